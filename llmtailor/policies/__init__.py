"""Policies: which parts of the model each save holds. Pure; they need nothing but the standard library.

``make_policy`` reads what the user wants, ``check_policy`` refuses what can't keep its word, and ``choose`` asks a
policy at a save.
"""

from __future__ import annotations

from llmtailor.policies.bound import IN_NO_SAVE, MAX_STALENESS, OLDEST, choose
from llmtailor.policies.check import check_policy, restore_state, state_of
from llmtailor.policies.schedules import Filter, Full, Parity, RoundRobin
from llmtailor.policies.situation import Choice, Policy, Situation, Stateful
from llmtailor.policies.spec import POLICIES, make_policy, named_policy
from llmtailor.policies.update import Update

__all__ = [
    "IN_NO_SAVE",
    "MAX_STALENESS",
    "OLDEST",
    "POLICIES",
    "Choice",
    "Filter",
    "Full",
    "Parity",
    "Policy",
    "RoundRobin",
    "Situation",
    "Stateful",
    "Update",
    "check_policy",
    "choose",
    "make_policy",
    "named_policy",
    "restore_state",
    "state_of",
]
