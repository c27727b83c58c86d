"""Policies choose the parts of the model that each save holds. Pure; needs only the standard library.

``make_policy`` parses the user's spec, ``check_policy`` refuses a policy that can't keep its promise, and ``choose``
asks a policy at a save.
"""

from __future__ import annotations

from llmtailor.policies.check import (
    IN_NO_SAVE,
    MAX_STALENESS,
    OLDEST,
    check_policy,
    choose,
    restore_state,
    saves_masters,
    staleness_limit,
    state_of,
)
from llmtailor.policies.policy import PartChoice, Policy, Situation, Stateful
from llmtailor.policies.schedules import (
    DEFAULT_POLICY,
    POLICIES,
    Adaptive,
    Filter,
    Full,
    MomentsInTurn,
    Parity,
    RoundRobin,
    make_policy,
    named_policy,
    setbacks,
)

__all__ = [
    "DEFAULT_POLICY",
    "IN_NO_SAVE",
    "MAX_STALENESS",
    "OLDEST",
    "POLICIES",
    "Adaptive",
    "Filter",
    "Full",
    "MomentsInTurn",
    "Parity",
    "PartChoice",
    "Policy",
    "RoundRobin",
    "Situation",
    "Stateful",
    "check_policy",
    "choose",
    "make_policy",
    "named_policy",
    "restore_state",
    "saves_masters",
    "setbacks",
    "staleness_limit",
    "state_of",
]
