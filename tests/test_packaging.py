"""An installed wheel, outside the repository, is the whole product: tables, pipeline, command."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from omni_fsm import tables

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the repository and installed into a directory of its own."""
    place = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(place), str(ROOT)], check=True
    )
    (wheel,) = place.glob("omni_fsm-*.whl")
    target = place / "site"
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--target", str(target), str(wheel)], check=True)
    return target


def run_installed(target: Path, *command: str) -> str:
    """Run Python on the wheel's files alone, in a directory that has nothing of the repository."""
    done = subprocess.run(
        [sys.executable, "-P", *command],
        cwd=target.parent,
        env={**os.environ, "PYTHONPATH": str(target)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


WHAT_IT_READS = """
import json, omni_fsm
from omni_fsm import tables
from omni_fsm.demo.pipeline import load_pipeline
print(json.dumps([omni_fsm.__file__, str(tables.specs_dir()), tables.spec_digest(), load_pipeline().stages]))
"""


def test_a_wheel_carries_the_tables_and_the_pipeline_that_the_checkout_runs(installed: Path) -> None:
    package, specs, digest, stages = json.loads(run_installed(installed, "-c", WHAT_IT_READS))
    assert Path(package).is_relative_to(installed)
    assert Path(specs) == installed / "omni_fsm" / "specs"
    assert tables.specs_dir() == ROOT / "specs"  # this process runs the checkout
    assert digest == tables.spec_digest()
    assert stages == ["thinker", "talker", "code2wav"]


@pytest.mark.speech
@pytest.mark.timeout(300)
def test_a_wheel_runs_the_demo(installed: Path, tmp_path: Path) -> None:
    printed = run_installed(
        installed, "-m", "omni_fsm", "demo", "--json", "--out", str(tmp_path), "--raise", "talker:1"
    )
    report = json.loads(printed.splitlines()[-1])
    assert [request["outcome"] for request in report["requests"]] == ["ok", "error", "ok"]
    assert [request["pcm_identical"] for request in report["requests"]] == [True, None, True]
