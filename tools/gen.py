"""Writes what is generated from specs/: the enums of `omni_fsm.protocol.names` and the pages of docs/protocol/.

python tools/gen.py            write
python tools/gen.py --check    exit 1 and name the file if one is stale
"""

import sys
from itertools import groupby
from pathlib import Path
from typing import Any

from transitions.extensions import GraphMachine

from omni_fsm.tables import Row, Spec, read_spec, resolved_rows, specs_dir

ROOT = Path(__file__).resolve().parent.parent
GENERATED = "Generated from specs/ by `make gen`. Edit the spec, not this file."
MACHINES = ("sender", "receiver", "kv_transfer", "connector")


def enum_source(name: str, doc: str, members: dict[str, str]) -> str:
    """One StrEnum whose members carry their meaning as a comment."""
    lines = [f"class {name}(StrEnum):", f'    """{doc}"""', *([""] if members else [])]
    for member, meaning in members.items():
        lines += [f"    #: {meaning}", f'    {member.upper()} = "{member}"']
    return "\n".join(lines)


def spoken(spec: Spec) -> str:
    """A machine's name in words."""
    return spec.machine.replace("_", " ").replace("kv", "KV")


def names_source(specs: list[Spec]) -> str:
    """The source of omni_fsm/protocol/names.py."""
    parts = [f'"""Names of states, events, bookkeeping and effects. {GENERATED}"""\n\nfrom enum import StrEnum']
    for spec in specs:
        words = spoken(spec)
        title = spec.machine.title().replace("_", "")
        parts += [
            enum_source(f"{title}State", f"States of the {words}.", spec.states),
            enum_source(f"{title}Event", f"Events of the {words}: what happened.", spec.events),
            enum_source(f"{title}Bookkeeping", f"What the {words} does to itself.", spec.bookkeeping),
            enum_source(f"{title}Effect", f"What the runtime does for the {words}.", spec.effects),
        ]
    return "\n\n\n".join(parts) + "\n"


def diagram(spec: Spec, rows: list[Row]) -> str:
    """The mermaid diagram of the moves between states, drawn by the ``transitions`` library."""
    moves = [row for row in rows if not row.ignored and row.next != row.state]
    moves.sort(key=lambda row: (list(spec.states).index(row.state), list(spec.states).index(row.next)))
    machine = GraphMachine(
        states=list(spec.states),
        initial=spec.initial,
        transitions=[
            {"trigger": ", ".join(row.event for row in group), "source": source, "dest": target}
            for (source, target), group in groupby(moves, key=lambda row: (row.state, row.next))
        ],
        auto_transitions=False,
        graph_engine="mermaid",
        title=f"title: {spoken(spec)}",
    )
    graph: Any = machine.get_combined_graph()  # the library's own type leaves out what every engine has
    lines = str(graph.source).strip().splitlines()
    return "\n".join(
        line for line in lines if not line.strip().lower().startswith("class")
    )  # colours of a live machine


def page(spec: Spec) -> str:
    """The Markdown page of one machine."""
    rows = list(resolved_rows(spec))
    cells = {(row.state, row.event): row for row in rows}
    lines = [
        f"# The {spoken(spec)}",
        "",
        f"<!-- {GENERATED} -->",
        "",
        "```mermaid",
        diagram(spec, rows),
        "```",
        "",
        "## States",
        "",
        "| state | means |",
        "| --- | --- |",
        *(f"| `{name}` | {meaning} |" for name, meaning in spec.states.items()),
        "",
        "## Matrix",
        "",
        "Next state (`·` stays) of each event in each state; *ign* is ignored; a blank is refused with a typed error.",
        "",
        "| event | " + " | ".join(spec.states) + " |",
        "| --- |" + " --- |" * len(spec.states),
    ]
    for event in spec.events:
        shown = (_cell(cells.get((state, event))) for state in spec.states)
        lines.append(f"| `{event}` | " + " | ".join(shown) + " |")
    lines += _rows_section(rows) + _ignored_section(rows)
    for title, told in (("Events", spec.events), ("Bookkeeping", spec.bookkeeping), ("Effects", spec.effects)):
        lines += ["", f"## {title}", "", "| name | means |", "| --- | --- |"]
        lines += [f"| `{name}` | {meaning} |" for name, meaning in told.items()]
    return "\n".join(lines) + "\n"


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    if row.ignored:
        return "*ign*"
    return "·" if row.next == row.state else f"**{row.next}**"


def _rows_section(rows: list[Row]) -> list[str]:
    lines = ["", "## Rows", "", "| state | event | next | in order |", "| --- | --- | --- | --- |"]
    return lines + [
        f"| {row.state} | `{row.event}` | {row.next} | {', '.join(row.actions)} |" for row in rows if not row.ignored
    ]


def _ignored_section(rows: list[Row]) -> list[str]:
    lines = ["", "## Ignored", "", "| state | event | why |", "| --- | --- | --- |"]
    return lines + [f"| {row.state} | `{row.event}` | {row.ignored} |" for row in rows if row.ignored]


def outputs() -> dict[Path, str]:
    """Every generated file and what it must hold."""
    specs = [read_spec(specs_dir() / f"{name}.toml") for name in MACHINES]
    pages = {ROOT / "docs" / "protocol" / f"{spec.machine}.md": page(spec) for spec in specs}
    return {ROOT / "omni_fsm" / "protocol" / "names.py": names_source(specs), **pages}


def main() -> int:
    """Write, or check with ``--check``."""
    stale = 0
    for path, text in outputs().items():
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        name = path.relative_to(ROOT)
        if "--check" in sys.argv:
            stale = 1
            print(f"{name} is stale: run `make gen`")
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            print(f"wrote {name}")
    return stale


if __name__ == "__main__":
    sys.exit(main())
