"""Hypothesis profiles: merges are repeatable, nights are not. ``HYPOTHESIS_PROFILE=night`` chooses the latter."""

import os

from hypothesis import HealthCheck, settings

settings.register_profile("merge", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("night", parent=settings.get_profile("merge"), derandomize=False, max_examples=2_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "merge"))
