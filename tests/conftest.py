"""Hypothesis profiles, and what becomes of tests whose packages are not installed.

Merges are repeatable, nights are not: ``HYPOTHESIS_PROFILE=night`` chooses the latter.
"""

import os
from importlib.util import find_spec

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("merge", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("night", parent=settings.get_profile("merge"), derandomize=False, max_examples=2_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "merge"))

_NO_VLLM = "vLLM is not installed: run `make setup-vllm`"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests of vLLM where it is not installed; the summary says so."""
    if find_spec("vllm") is None:
        for item in items:
            if item.get_closest_marker("vllm"):
                item.add_marker(pytest.mark.skip(reason=_NO_VLLM))
