"""Asks policies, save by save, with the code that a training uses, and composes what would be left after a failure.

The states are those of one training that was never interrupted: what a policy saves changes nothing in it. Only the
files are left out; `check` proves that a composite is what ``llmtailor merge --run`` makes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from llmtailor.checkpoint.lineage import Ledger
from llmtailor.live.model import Drift, TrainedModel, change_of, find_trained_parts
from llmtailor.live.torch_training import TorchTraining
from llmtailor.live.training import LiveShard
from llmtailor.model.parts import ExpertSlice, ModelStructure
from llmtailor.model.roles import EXP_AVG, EXP_AVG_SQ, MASTER
from llmtailor.policies import Policy, Situation, check_policy, choose, saves_masters
from llmtailor.ranks.team import Ranks
from study.train import State, Training


@dataclass(frozen=True)
class Left:
    """What the saves of a policy leave at each saved step."""

    held: Mapping[int, Mapping[str, int]]
    """Step of a save -> part -> step of its newest save"""
    num_bytes: tuple[int, ...]
    """Of each save after the base"""
    expected: Mapping[int, float]
    """Step of a save -> sum of the expected losses of the parts that it left out"""
    rate: Mapping[int, float]
    """Step of a save -> the expected loss of the whole model if it were one save older, estimated from those of the
    parts"""
    full: int
    """Bytes of a save of everything"""
    has_masters: bool
    """Whether each save has all masters, so that only moments are of another step"""

    @property
    def share(self) -> float:
        return sum(self.num_bytes) / len(self.num_bytes) / self.full


def parts_of(training: Training) -> TrainedModel:
    """Return the parts of a model that has been trained for a step, and their bytes. Experts are parts."""
    plain = TorchTraining(training.model, training.optimizer)
    return find_trained_parts(plain, Ranks.here(), "parts" if training.setting.size.experts else None)[0]


def ask(policy: Policy, model: TrainedModel, states: Mapping[int, State]) -> Left:
    """Return what a policy leaves if it saves at the steps of these states, the first one being the base."""
    limit = check_policy(policy, model.structure, model.parts, model.num_bytes)
    drift, ledger = Drift(model.part_of), Ledger("study")
    held, sizes, expected, rate = {}, [], {}, {}
    for step in sorted(states):
        found = [*_fragments(states[step], model.structure)]
        correction = 1 - 0.999 ** max(states[step].adam.values())
        change, last = change_of([drift.sums(found, correction)]), ledger.last
        chosen = [*model.parts]
        if ledger.held_by:
            sizes_now = model.num_bytes
            situation = Situation(
                step,
                ledger.saves,
                model.structure,
                model.parts,
                sizes_now,
                last,
                change.drift if policy.needs_drift else None,
                change.expected_loss if policy.needs_drift else None,
            )
            choice = choose(policy, situation, limit)
            chosen = [*choice.parts]
            sizes.append(sum(sizes_now[part] for part in chosen) + sum(sizes_now[part] for part in choice.masters) // 3)
            expected[step] = sum(one for part, one in change.expected_loss.items() if part not in chosen)
            rate[step] = sum(one / (ledger.saves - last[part]) for part, one in change.expected_loss.items())
        ledger = ledger.after(step, chosen, model.parts)
        drift.remember(drift.samples((one for one in found if one.kind == MASTER), chosen))
        held[step] = ledger.steps
    return Left(held, tuple(sizes), expected, rate, sum(model.num_bytes.values()), saves_masters(policy))


def composite(left: Left, model: TrainedModel, states: Mapping[int, State], step: int) -> State:
    """Return the state that training goes on from after a failure at a saved step."""
    held = {name: left.held[step][part] for name, part in model.part_of.items()}
    made = compose(states, held, step, model.structure.pieces)
    if left.has_masters:
        now = states[step].params
        made = replace(made, params={name: (now[name][0], *old[1:]) for name, old in made.params.items()})
    return made


def compose(
    states: Mapping[int, State],
    held: Mapping[str, int],
    at: int,
    pieces: Mapping[str, ExpertSlice] = MappingProxyType({}),
) -> State:
    """Return the state at a step in which each param, or piece of one, comes from a state of its own."""
    params, adam = dict(states[at].params), dict(states[at].adam)
    pieces_of: dict[str, list[str]] = {}
    for name, step in held.items():
        if name in pieces:
            pieces_of.setdefault(pieces[name].param, []).append(name)
        else:
            params[name], adam[name] = states[step].params[name], states[step].adam[name]
    for param, names in pieces_of.items():
        mixed = tuple(value.clone() for value in params[param])
        for piece, old in ((pieces[name], states[held[name]].params[param]) for name in names):
            for value, older in zip(mixed, old, strict=True):
                value.view(-1)[piece.begin : piece.end] = older.view(-1)[piece.begin : piece.end]
        params[param], steps = mixed, {held[name] for name in names}
        if len(steps) == 1:  # otherwise the tensor's one step of Adam is the newest
            adam[param] = states[steps.pop()].adam[param]
    return State(at, params, adam)


def _fragments(state: State, structure: ModelStructure) -> Iterator[LiveShard]:
    pieces_of = structure.pieces_of
    for param, values in state.params.items():
        for name in pieces_of.get(param, [param]):
            piece = structure.pieces.get(name)
            for kind, value in zip((MASTER, EXP_AVG, EXP_AVG_SQ), values, strict=True):
                own = value.reshape(-1)[piece.begin : piece.end] if piece else value.reshape(-1)
                yield LiveShard(name, kind, 0, own)
