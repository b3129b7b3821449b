"""A trace as a mermaid sequence diagram."""

from omni_fsm.verify.explore import Step


def sequence_diagram(trace: list[Step], problem: str) -> str:
    """Draw a trace: who does what to whom, and at the end the property that it breaks.

    Args:
        trace: As `omni_fsm.verify.explore` gives it.
        problem: The broken property.
    """
    names = list(dict.fromkeys(name for step in trace for name in (step.source, step.target)))
    lines = ["sequenceDiagram", *(f"    participant {name}" for name in names)]
    lines += [f"    {step.source}->>{step.target}: {number} {_text(step.name)}" for number, step in enumerate(trace, 1)]
    if names:
        lines.append(f"    Note over {','.join(dict.fromkeys((names[0], names[-1])))}: {_text(problem)}")
    return "\n".join(lines)


def _text(text: str) -> str:
    """What mermaid takes for the end of a line, or for a comment, is left out."""
    return " ".join(text.replace(";", ",").replace("#", "no. ").split())
