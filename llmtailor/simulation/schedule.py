"""Runs a policy over a model, save by save, with the code that a training uses. Pure.

`policies.choose` decides what a save holds, `Ledger` remembers it, and `runs.retention.deletable` deletes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from llmtailor.checkpoint.lineage import Ledger, RunCheckpoint
from llmtailor.errors import UsageError
from llmtailor.policies import Policy, Situation, Update, check_policy, choose
from llmtailor.runs.retention import deletable
from llmtailor.simulation.model import ModelSize

PARTIAL_BYTES = 12
"""Per param of a partial checkpoint: fp32 master, exp_avg and exp_avg_sq"""
MASTER_BYTES = 4
"""Per param of which it holds the master alone"""
TRAINER_BYTES = 14
"""Per param of a full checkpoint of the Trainer with DeepSpeed: these, and the bf16 weight"""
NUM_SAVES = 600
"""Simulated saves behind the base, a multiple of the periods of usual policies"""
_DISK_SAVES = 24
"""Of these, retention is simulated over so many, or over three times the age that a part may reach, if that is more."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """What the saves of a policy hold, apart from the complete first one."""

    num_bytes: tuple[int, ...]
    """Size of each save"""
    mean_age: float
    """Of a param in a composite of the newest save, in saves"""
    oldest: int
    """The greatest age that a part reaches, in saves"""
    on_disk: int
    """The most bytes on disk at once"""
    setback: float
    """By how many saves training falls back because masters in a composite are stale, on average; stale moments, which
    cost little (docs/fidelity.md), count as nothing"""

    @property
    def mean(self) -> float:
        return sum(self.num_bytes) / len(self.num_bytes)

    @property
    def largest(self) -> int:
        return max(self.num_bytes)


def trainer_schedule(model: ModelSize, keep: int) -> Schedule:
    """Return the Trainer's own full checkpoints with ``save_total_limit=keep``, which are deleted after a new one."""
    size = model.total * TRAINER_BYTES
    return Schedule((size,), 0.0, 0, (keep + 1) * size, 0.0)


def simulate(
    policy: Policy,
    model: ModelSize,
    keep: int,
    max_staleness: int | None,
    drift: Mapping[str, float] | None,
    expected_loss: Mapping[str, float] | None = None,
) -> Schedule:
    """Run a policy over a model.

    Args:
        keep: how many of the newest steps stay composable.
        max_staleness: see `check_policy`.
        drift: part -> relative change from one save to the next, for policies that need it. What has not been saved
            for n saves has changed by n times as much.
        expected_loss: part -> what its change from one save to the next means for the loss. None: all params mean the
            same.

    Raises UsageError if the policy is refused, as in a training, or needs a drift and there is none.
    """
    num_bytes = {part: numel * PARTIAL_BYTES for part, numel in model.numels.items()}
    limit = check_policy(policy, model.structure, model.parts, num_bytes, max_staleness)
    if isinstance(policy, Update) and drift is None:
        fix = "give --drift, or the folder of a run whose saves have measured it"
        raise UsageError.at(f"policy {policy.name}", "it decides by how much each part changes, which is unknown", fix)
    ledger = Ledger("run").after(0, model.parts, model.parts)
    on_disk = {0: RunCheckpoint.saved(Path(), ledger)}
    rates = {part: (expected_loss or model.numels).get(part, 0.0) for part in model.parts}
    everything = sum(rates.values()) or 1.0
    sizes, oldest, most, aged, behind = [], 0, 0, 0, 0.0
    bytes_at = {0: sum(num_bytes.values())}
    for save in range(1, NUM_SAVES + 1):
        last = ledger.last
        changed = {part: (drift or {}).get(part, 0.0) * (save - last[part]) for part in model.parts}
        costs = {part: rates[part] * (save - last[part]) for part in model.parts}
        situation = Situation(save, save, model.structure, model.parts, num_bytes, last, changed, costs)
        choice = choose(policy, situation, limit)
        chosen, masters = choice.parts, choice.masters
        ledger = ledger.after(save, chosen, model.parts)
        sizes.append(
            sum(num_bytes[part] for part in chosen) + MASTER_BYTES * sum(model.numels[part] for part in masters)
        )
        ages = {part: save - held for part, held in ledger.last.items()}
        oldest = max(oldest, *ages.values())
        behind += sum(costs[part] for part in model.parts if part not in chosen and not masters) / everything
        aged += sum(age * model.numels[part] for part, age in ages.items())
        if save <= max(_DISK_SAVES, 3 * limit):
            on_disk[save], bytes_at[save] = RunCheckpoint.saved(Path(), ledger, masters), sizes[-1]
            most = max(most, sum(bytes_at[step] for step in on_disk))
            for step in deletable([*on_disk.values()], ledger, keep):
                del on_disk[step]
    return Schedule(tuple(sizes), aged / NUM_SAVES / model.total, oldest, most, behind / NUM_SAVES)
