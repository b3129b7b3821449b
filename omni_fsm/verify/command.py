"""What ``omni-fsm explore`` prints."""

from dataclasses import dataclass
from typing import Any

from rich.console import Console

from omni_fsm.verify import report
from omni_fsm.verify.diagram import sequence_diagram
from omni_fsm.verify.explore import Found
from omni_fsm.verify.mutants import SURVIVORS


@dataclass(frozen=True)
class Report:
    """What was found: whether all is as it should be, and the JSON object that says it."""

    content: dict[str, Any]
    is_well: bool


def show_scopes(console: Console, *, deep: bool, diagram: bool) -> Report:
    """Explore every scope."""
    explored = []
    for each in report.explore_all(deep=deep):
        explored.append(each)
        counts = f"{each.found.states} states, {each.found.transitions} transitions, {len(each.rows)} rows reached"
        _say(console, f"{each.named.name}: {counts}, {each.seconds:.0f} s")
        _say(console, f"  violations: {f'1, {each.problem}' if each.problem else 0}")
        _show_trace(console, each.found, diagram=diagram)
    missing = report.missing_rows(explored)
    for row in missing:
        _say(console, f"never reached: {' '.join(row)}")
    scopes = [
        {
            "name": each.named.name,
            "states": each.found.states,
            "transitions": each.found.transitions,
            "rows": len(each.rows),
            "violations": int(bool(each.problem)),
            "seconds": round(each.seconds, 1),
        }
        for each in explored
    ]
    content = {"scopes": scopes, "never_reached": [" ".join(row) for row in missing]}
    return Report(content, is_well=not missing and not any(each.problem for each in explored))


def show_faults(console: Console, name: str, *, diagram: bool) -> Report:
    """Put one fault of the catalogue in, or each of them and each mutant of the tables.

    Raises:
        ConfigError: There is no fault of that name.
    """
    faults = report.chosen_faults(name)
    shown = []
    for fault in faults:
        found = report.find_fault(fault)
        verdict = f"found in {len(found.trace)} steps: {found.problem}" if found.problem else "NOT FOUND"
        _say(console, f"{fault.name} ({fault.what}): {verdict}")
        if len(faults) == 1:
            _show_trace(console, found, diagram=diagram)
        shown.append({"name": fault.name, "found": bool(found.problem), "steps": len(found.trace)})
    content: dict[str, Any] = {"faults": shown}
    is_well = all(one["found"] for one in shown)
    if name == "all":
        content["mutants"], explained = _show_mutants(console)
        is_well = is_well and explained
    return Report(content, is_well)


def _show_mutants(console: Console) -> tuple[dict[str, Any], bool]:
    seen = list(report.notice_mutants())
    survivors = [one.mutant for one in seen if not one.problem]
    noticed = len(seen) - len(survivors)
    _say(console, f"one-cell mutants of both tables: {noticed} of {len(seen)} noticed")
    reasons = {name: SURVIVORS.get(name, "") for name in survivors}
    for name, reason in reasons.items():
        _say(console, f"  survives: {name}: {reason or 'NO REASON IS KNOWN'}")
    listed = [{"mutant": name, "reason": reason} for name, reason in reasons.items()]
    return {"total": len(seen), "noticed": noticed, "survivors": listed}, all(reasons.values())


def show_cases(console: Console) -> Report:
    """List the faults that were met in the field."""
    cases = report.field_cases()
    for case in cases:
        where = case.get("test") or case.get("why") or f"needs {case['requirement']}"
        _say(console, f"{case['number']:3} {case['status']:12} {case['what']}")
        _say(console, f"    {where}")
    listed = [{key: case.get(key) for key in ("number", "status", "test")} for case in cases]
    return Report({"cases": listed}, is_well=True)


def _show_trace(console: Console, found: Found, *, diagram: bool) -> None:
    for number, step in enumerate(found.trace, 1):
        _say(console, f"  {number:3} {step.name}")
    if diagram and found.trace:
        _say(console, sequence_diagram(found.trace, found.problem))


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)
