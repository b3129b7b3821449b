"""Measurements that ``omni-fsm bench`` runs: medians of alternating rounds, compared within one run."""
