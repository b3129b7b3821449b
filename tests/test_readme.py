"""The README tells the truth: its example runs, prints what it says, and fails as it says."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from omni_fsm import adapters, payload, runtime, testing
from omni_fsm.adapters import StageRunnerAdapter
from omni_fsm.connectors import Hello, memory_pair
from omni_fsm.protocol import Edge, LocalProtocolError
from omni_fsm.runtime import StageConfig

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
GUIDE = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")


def python_blocks(text: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def test_the_example_runs_and_prints_what_the_readme_says(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = python_blocks(README)
    names: dict[str, Any] = {}
    exec(compile(example, "README.md", "exec"), names)  # noqa: S102 - the README is ours
    printed = capsys.readouterr().out.strip()
    assert printed == "chunks travel in order ok"
    assert f"It prints `{printed}`." in README


@pytest.mark.parametrize(
    ("block", "printed"),
    [
        (0, "[6, 6] ok"),
        (1, "got (25, 1024)\n" * 3),
        (2, ""),
        (3, ""),
        (4, "[3, 3, 1] [0, 1, 2, 3, 4, 5, 6] True"),
        (5, "a: [2, 4] ok, b: [60] ok, c: [] error(no such voice)"),
        (6, "thinker: sender talker: receiver True\nTrue {'text': 'one two'}"),
        (7, "all in one\nTrue True closed"),
        (8, "[2, 4, 6]"),
        (9, "True 0"),
        (10, "[2, 4, 6]"),
    ],
    ids=["middle", "shm", "host", "logs", "older", "scheduler", "wiring", "steps", "ranks", "kv", "asyncio"],
)
def test_the_guide_s_examples_run_and_print_what_it_says(block: int, printed: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", python_blocks(GUIDE)[block]], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, printed.strip()), done.stderr
    assert all(f"`{line}`" in GUIDE for line in printed.splitlines())


def test_every_link_of_the_documents_leads_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "specs" / "FORMAT.md"]
    links = [
        (page, link) for page in pages for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8"))
    ]
    assert links
    assert [f"{page.name}: {link}" for page, link in links if not (page.parent / link).exists()] == []


def test_a_submit_after_the_own_end_raises_what_the_readme_shows() -> None:
    sink, source = memory_pair(Hello(Edge("thinker", "talker")))
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
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert [
        target for target in ("demo", "test") if f"make {target}" in README and f"\n{target}: setup" in makefile
    ] == [
        "demo",
        "test",
    ]


NAMED = [adapters, runtime, payload, testing]
EQUIVALENTS = (ROOT / "docs" / "equivalents.md").read_text(encoding="utf-8")


def test_what_the_table_of_equivalents_names_exists() -> None:
    rights = [line.split("|")[2] for line in EQUIVALENTS.splitlines() if line.startswith("| `")]
    dotted = {name for right in rights for name in re.findall(r"`([A-Z]\w+\.\w+)", right)}
    assert len(rights) > 40
    assert len(dotted) > 20
    for name in dotted:
        owner, _, attribute = name.partition(".")
        holder = next((getattr(module, owner) for module in NAMED if hasattr(module, owner)), None)
        assert holder is not None, name
        assert hasattr(holder, attribute) or f"{attribute}:" in str(holder.__doc__), name
