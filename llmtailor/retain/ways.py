"""What a user wants older checkpoints to keep. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmtailor.core.anatomy import Anatomy
from llmtailor.errors import Problem, UsageError
from llmtailor.history.ledger import Ledger
from llmtailor.policies import Policy, Situation, choose, make_policy, named_policy
from llmtailor.recipe.selectors import select
from llmtailor.recipe.words import condense

BASE = "complete base"
UNBOUNDED = 1 << 30
"""Saves. The limit of a selection: parts that it leaves out stay those of the base."""


@dataclass(frozen=True, slots=True)
class Thinning:
    """How to thin out a run."""

    keep_full: int
    """So many of the newest full checkpoints stay as they are; 1 or more."""
    strategy: str | None = None
    """A policy, as `policies.make_policy` reads it: it says which parts each older checkpoint keeps."""
    selectors: tuple[str, ...] = ()
    """Or the parts that all of them keep, as in a recipe. With neither, they keep no optimizer state at all."""

    @property
    def weights_only(self) -> bool:
        return self.strategy is None and not self.selectors


@dataclass(frozen=True, slots=True)
class Selected:
    """The policy of a selection: the same parts every time."""

    parts: frozenset[str]
    selectors: tuple[str, ...]
    name: str = "select"
    needs_drift: bool = False

    def choose(self, situation: Situation) -> dict[str, str]:
        return {part: "selected" for part in situation.parts if part in self.parts}

    def worst_staleness(self, anatomy: Anatomy, parts: Sequence[str]) -> int:
        return UNBOUNDED

    def settings(self) -> dict[str, Any]:
        return {"selectors": list(self.selectors)}


def make_chooser(thinning: Thinning, anatomy: Anatomy, trained: Sequence[str]) -> Chooser:
    """Return what says which parts a checkpoint keeps. ``trained`` are the parts with trained params.

    Raises UsageError for a strategy or selectors that make no sense.
    """
    policy: Policy
    if thinning.strategy is not None:
        if (kind := named_policy(thinning.strategy)) and kind.needs_drift:  # before it is asked for its options
            what = f"{kind.name} goes by how much the parts change, which only the training itself can measure"
            raise UsageError.at("--strategy", what, "take full, parity, filter or round_robin:4")
        policy = make_policy(thinning.strategy)
        bound = policy.worst_staleness(anatomy, trained)
        assert bound is not None, "only what goes by the change of parts has no bound"
        return Chooser(policy, bound, anatomy, tuple(trained))
    policy = Selected(_whole_parts(thinning.selectors, anatomy, trained), thinning.selectors)
    return Chooser(policy, UNBOUNDED, anatomy, tuple(trained))


def _whole_parts(selectors: Sequence[str], anatomy: Anatomy, trained: Sequence[str]) -> frozenset[str]:
    names, found = select(selectors, anatomy, "--select")
    problems = list(found)
    touched = dict.fromkeys(part for name, part in anatomy.part_of.items() if name in names)
    split = [part for part in touched if not names.issuperset(anatomy.names(part))]
    if split:
        what = f"they select only some of the tensors of {condense(split)}"
        problems.append(Problem("--select", what, "select whole parts"))
    chosen = frozenset(touched) & frozenset(trained)
    if not problems and not chosen:
        problems.append(Problem("--select", "nothing of what they select is trained", "select parts that are"))
    if problems:
        raise UsageError(problems)
    return chosen


@dataclass(frozen=True, slots=True)
class Chooser:
    """Asks a policy which parts a checkpoint keeps, as the training-side saver does."""

    policy: Policy
    bound: int
    """No part becomes older than so many saves."""
    anatomy: Anatomy
    trained: tuple[str, ...]

    def choose(self, ledger: Ledger, step: int, num_bytes: Mapping[str, int]) -> dict[str, str]:
        """Return the parts that the checkpoint of a step keeps, and why; the first one of a ledger keeps all."""
        if not ledger.held_by:
            return dict.fromkeys(self.trained, BASE)
        situation = Situation(
            step=step,
            save=ledger.saves,
            anatomy=self.anatomy,
            parts=self.trained,
            num_bytes=num_bytes,
            last=ledger.last,
        )
        return dict(choose(self.policy, situation, self.bound).parts)

    def settings(self) -> dict[str, Any]:
        """Return the policy as the manifest tells it."""
        return {"name": self.policy.name, **self.policy.settings(), "made_of_full_checkpoints": True}
