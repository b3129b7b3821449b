"""The README tells the truth: its example runs, prints what it says, and fails as it says."""

import re
from pathlib import Path
from typing import Any

import pytest

from omni_fsm.adapters import StageRunnerAdapter
from omni_fsm.connectors import Hello, memory_pair
from omni_fsm.protocol import Edge, LocalProtocolError
from omni_fsm.runtime import StageConfig
from omni_fsm.tables import spec_digest

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def test_the_example_runs_and_prints_what_the_readme_says(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(example, "README.md", "exec"), names)  # noqa: S102 - the README is ours
    printed = capsys.readouterr().out.strip()
    assert printed == "chunks travel in order ok"
    assert f"It prints `{printed}`." in README


def test_a_submit_after_the_own_end_raises_what_the_readme_shows() -> None:
    sink, source = memory_pair(Hello(Edge("thinker", "talker"), spec_digest()))
    source.close()  # nobody takes the end: the sender stays where it is
    with StageRunnerAdapter(StageConfig(stage="thinker", shutdown_grace_s=0.0), sink=sink) as thinker:
        request, _ = thinker.open("request/7")
        thinker.end(request)
        with pytest.raises(LocalProtocolError) as caught:
            thinker.submit_chunk(request, {"word": "late"})
    told = re.sub(r"#\d+", "#N", str(caught.value))
    shown = re.sub(r"#\d+", "#N", README[README.index("sender request/7#") :].split("...")[0])
    assert told.startswith(shown.removesuffix(", ").rstrip())
    assert (caught.value.machine, caught.value.state, caught.value.event) == (
        "sender",
        "terminal_pending",
        "chunk_submitted",
    )


def test_both_commands_of_the_readme_are_targets_of_the_makefile() -> None:
    makefile = (Path(__file__).parent.parent / "Makefile").read_text(encoding="utf-8")
    assert [
        target for target in ("demo", "test") if f"make {target}" in README and f"\n{target}: setup" in makefile
    ] == [
        "demo",
        "test",
    ]
