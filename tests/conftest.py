"""Hypothesis profiles, and what becomes of tests whose packages or devices are not here.

Merges are repeatable, nights are not: ``HYPOTHESIS_PROFILE=night`` chooses the latter.
"""

import os
from importlib.util import find_spec

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile("merge", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("night", parent=settings.get_profile("merge"), derandomize=False, max_examples=2_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "merge"))

_NEEDS = {
    "vllm": (find_spec("vllm") is not None, "vLLM is not installed: run `make setup-vllm`"),
    "gpu": (torch.cuda.is_available(), "there is no CUDA device"),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests whose packages or devices are not here; the summary says so."""
    for marker, (is_here, why) in _NEEDS.items():
        if not is_here:
            for item in items:
                if item.get_closest_marker(marker):
                    item.add_marker(pytest.mark.skip(reason=why))
