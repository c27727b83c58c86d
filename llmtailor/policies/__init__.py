"""Policies choose the parts of the model that each save holds. Pure; needs only the standard library.

``make_policy`` parses the user's spec, ``check_policy`` refuses a policy that can't keep its promise, and ``choose``
asks a policy at a save.
"""

from __future__ import annotations

from llmtailor.policies.check import IN_NO_SAVE as IN_NO_SAVE
from llmtailor.policies.check import MAX_STALENESS as MAX_STALENESS
from llmtailor.policies.check import OLDEST as OLDEST
from llmtailor.policies.check import check_policy as check_policy
from llmtailor.policies.check import choose as choose
from llmtailor.policies.check import precision_of as precision_of
from llmtailor.policies.check import restore_state as restore_state
from llmtailor.policies.check import saves_masters as saves_masters
from llmtailor.policies.check import state_of as state_of
from llmtailor.policies.policy import PartChoice as PartChoice
from llmtailor.policies.policy import Policy as Policy
from llmtailor.policies.policy import Situation as Situation
from llmtailor.policies.schedules import DEFAULT_POLICY as DEFAULT_POLICY
from llmtailor.policies.schedules import EXACT_POLICY as EXACT_POLICY
from llmtailor.policies.schedules import POLICIES as POLICIES
from llmtailor.policies.schedules import Adaptive as Adaptive
from llmtailor.policies.schedules import Budget as Budget
from llmtailor.policies.schedules import Filter as Filter
from llmtailor.policies.schedules import Full as Full
from llmtailor.policies.schedules import MomentsInTurn as MomentsInTurn
from llmtailor.policies.schedules import Parity as Parity
from llmtailor.policies.schedules import Rounded as Rounded
from llmtailor.policies.schedules import RoundRobin as RoundRobin
from llmtailor.policies.schedules import fitted as fitted
from llmtailor.policies.schedules import make_policy as make_policy
from llmtailor.policies.schedules import named_policy as named_policy
from llmtailor.policies.schedules import setbacks as setbacks
