"""Simulates what a policy would save of a model, how often to save, and what saves and failures would cost.

The saves are those of a training: `policies.choose` decides what each holds, `Ledger` remembers it, and
`runs.retention.deletable` deletes. The costs are formulas over their bytes; docs/policies.md explains them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmtailor.checkpoint.lineage import Ledger, RunCheckpoint
from llmtailor.checkpoint.optimizer import Mesh
from llmtailor.containers.json import read_json
from llmtailor.documents import document
from llmtailor.errors import Problem, SourceError, UsageError
from llmtailor.formats.param_names import describe_config
from llmtailor.formats.registry import index_checkpoint, is_checkpoint
from llmtailor.frameworks.files import CONFIG
from llmtailor.model.find_parts import find_parts, split_experts
from llmtailor.model.parts import ModelStructure, Part
from llmtailor.model.precision import EXACT, Precision
from llmtailor.model.roles import ADAM_BYTES
from llmtailor.policies import Policy, Situation, check_policy, choose, saves_masters
from llmtailor.runs.retention import deletable
from llmtailor.runs.spread import Spread, axes_of, check_mesh, spread

MASTER_BYTES = 4
"""Per param: the fp32 master"""
WEIGHT_BYTES = 2
"""Per param: the bf16 weight, which only a full checkpoint of the Trainer with DeepSpeed has"""
NUM_SAVES = 600
"""Simulated saves behind the base, a multiple of the periods of usual policies"""
_DISK_SAVES = 24
"""Of these, retention is simulated over so many, or over three times the age that a part may reach, if that is more."""
LASTING = 0.5
"""Steps of work that are lost for good, for each step by which stale parts set training back: measured, see
benchmarks/fidelity.md"""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What a save of a model can hold."""

    name: str
    structure: ModelStructure
    numels: Mapping[str, int]
    """Part -> trained params, for the parts that have any, in the order of the model"""
    state_bytes: float = ADAM_BYTES
    """Of the optimizer's states in training, per param"""
    precision: Precision = EXACT
    """Of what partial checkpoints hold; one that rounds moments assumes AdamW"""
    spread: Spread | None = None
    """Over the ranks, if their mesh is known"""
    mesh_problems: tuple[Problem, ...] = ()
    """Why the model can't be trained on the mesh that was given"""

    @property
    def on_rank_0(self) -> dict[Part, int]:
        """Part -> trained params on the rank that has the most; empty if the mesh is unknown"""
        numels: dict[Part, int] = {}
        for param, numel in self.spread.on_rank_0.items() if self.spread else ():
            part = self.structure.part_of[param]
            numels[part] = numels.get(part, 0) + numel
        return numels

    @property
    def parts(self) -> tuple[Part, ...]:
        return tuple(part for part in self.structure.parts if part in self.numels)

    @property
    def saved_bytes(self) -> float:
        """Per param of a part in a partial checkpoint"""
        is_exact = self.precision.moments == EXACT.moments or self.state_bytes != ADAM_BYTES
        return self.precision.master_bytes(with_moments=True) + (
            self.state_bytes if is_exact else self.precision.moment_bytes
        )

    @property
    def total(self) -> int:
        return sum(self.numels.values())


@dataclass(frozen=True, slots=True)
class SimulatedSaves:
    """What the saves of a policy hold, apart from the complete first one."""

    num_bytes: tuple[int, ...]
    """Size of each save"""
    mean_age: float = 0.0
    """Of a param in a composite of the newest save, in saves"""
    oldest: int = 0
    """The greatest age that a part reaches, in saves"""
    on_disk: int = 0
    """The most bytes on disk at once"""
    setback: float = 0.0
    """By how many saves training falls back because masters in a composite are stale, on average; stale moments, which
    cost little (benchmarks/fidelity.md), count as nothing"""
    on_rank_0: tuple[int, ...] = ()
    """Bytes of each save that the rank with the most writes, if the mesh is known"""

    @property
    def mean(self) -> float:
        return sum(self.num_bytes) / len(self.num_bytes)

    @property
    def largest(self) -> int:
        return max(self.num_bytes)

    @property
    def on_rank_0_mean(self) -> float | None:
        return sum(self.on_rank_0) / len(self.on_rank_0) if self.on_rank_0 else None


@dataclass(frozen=True, slots=True)
class Hardware:
    write_bytes_per_s: float
    """Of all ranks together, until files are durable"""
    step_s: float
    """Seconds of an optimizer step"""
    mtbf_s: float
    """Mean time between failures of the whole training, in seconds"""
    slowdown: float
    """By which share of their time steps are slower while a save is written in the background"""


@dataclass(frozen=True, slots=True)
class Cost:
    """What saving at the best interval costs, in seconds."""

    in_background: bool
    save_s: float
    """That a save adds to the training"""
    publish_s: float
    """From the start of a save until it can be resumed from"""
    save_steps: int
    """Optimizer steps between two saves"""
    period_s: float
    """From one save to the next"""
    lost_s_per_failure: float
    """Work that a failure costs on average: half a period, what was done while the newest save was written, and the
    setback by stale parts"""
    time_lost: float
    """The share of the time lost to saves and failures, at most 1"""


def mesh_of(path: Path) -> Mesh | None:
    """Return the mesh of the ranks that saved a checkpoint, as far as its files say; None for anything else.

    Raises SourceError or UnsupportedCheckpoint for a checkpoint that can't be read.
    """
    if not path.is_dir() or not is_checkpoint(path):
        return None
    index = index_checkpoint(path)
    if index.dcp and (saved := index.dcp.mesh) and len(saved.shape) == 2 and saved.cuts[0] is None:
        return Mesh(dp=saved.shape[1], dp_replicate=saved.shape[0])
    return Mesh(index.tp, index.world_size // index.tp)


def size_of_config(path: Path, experts: bool = False, mesh: Mesh | None = None) -> ModelSize:
    """Return the size of the model that a config.json, or a folder with one, describes; all params are trained.

    With ``experts``, each expert of a layer is a part. A ``mesh`` of one rank is none. transformers builds the model
    without data in a process of its own, which takes seconds. Raises SourceError, UnsupportedCheckpoint if transformers
    does not know the model, Unanswered if it does not answer, and UsageError if the model has no params.
    """
    file = path / CONFIG if path.is_dir() else path
    where = str(file)
    if not file.exists():
        raise SourceError.at(
            where, "it does not exist", "name a config.json, or a folder with one, such as a checkpoint"
        )
    config = read_json(file, where)
    facts = describe_config(config, where)
    params = {name: math.prod(shape) for name, shape in facts.params.items()}
    structure = find_parts([*params, *facts.buffers], dict(facts.tied), params, config)
    if experts:
        structure = split_experts(structure, {**dict.fromkeys((*facts.buffers, *facts.tied), ()), **facts.params})
    numels, pieces_of = dict.fromkeys(structure.parts, 0), structure.pieces_of
    for param, numel in params.items():
        for name in pieces_of.get(param, [param]):
            numels[structure.part_of[name]] += structure.pieces[name].numel if param in pieces_of else numel
    if not any(numels.values()):
        raise UsageError.at(where, "the model has no params", "name another model")
    name = file.absolute().parent.name if file.name == CONFIG else file.stem
    size = ModelSize(name, structure, {part: numel for part, numel in numels.items() if numel})
    if mesh is None or math.prod((axes := axes_of(mesh)).values()) == 1:
        return size
    if problems := check_mesh(axes, facts.params, facts.tp_plan, config):
        return replace(size, mesh_problems=tuple(problems))
    return replace(size, spread=spread(axes, facts.params, facts.tp_plan))


def trainer_schedule(model: ModelSize, keep: int) -> SimulatedSaves:
    """Return the Trainer's own full checkpoints with ``save_total_limit=keep``, which are deleted after a new one."""
    size = round(model.total * (MASTER_BYTES + model.state_bytes + WEIGHT_BYTES))
    return SimulatedSaves((size,), on_disk=(keep + 1) * size)


def simulate(policy: Policy, model: ModelSize, keep: int, max_staleness: int | None = None) -> SimulatedSaves:
    """Run a policy over a model whose params all change alike; ``keep`` newest steps stay composable.

    Raises UsageError if the policy is refused, as in a training; ``max_staleness`` is that of `check_policy`.
    """
    num_bytes = {part: round(numel * model.saved_bytes) for part, numel in model.numels.items()}
    limit = check_policy(policy, model.structure, model.parts, num_bytes, max_staleness)
    ledger = Ledger("run").after(0, model.parts, model.parts)
    on_disk, bytes_at = {0: RunCheckpoint.saved(Path(), ledger)}, {0: sum(num_bytes.values())}
    sizes, oldest, most, aged, on_rank_0 = [], 0, 0, 0, list[int]()
    of_rank_0 = model.on_rank_0
    for save in range(1, NUM_SAVES + 1):
        last = ledger.last
        changed = {part: float(numel * (save - last[part])) for part, numel in model.numels.items()}
        now = Situation(save, save, model.structure, model.parts, num_bytes, last, changed, changed)
        choice = choose(policy, now, limit)
        ledger = ledger.after(save, choice.parts, model.parts)
        alone = sum(model.numels[part] for part in choice.masters)
        master_bytes = model.precision.master_bytes(with_moments=False)
        sizes.append(sum(num_bytes[part] for part in choice.parts) + round(alone * master_bytes))
        if model.spread is not None:
            numels = (sum(of_rank_0.get(part, 0) for part in some) for some in (choice.parts, choice.masters))
            on_rank_0.append(round(next(numels) * model.saved_bytes + next(numels) * master_bytes))
        ages = {part: save - saved_at for part, saved_at in ledger.last.items()}
        oldest = max(oldest, *ages.values())
        aged += sum(age * model.numels[part] for part, age in ages.items())
        if save <= max(_DISK_SAVES, 3 * limit):
            on_disk[save], bytes_at[save] = RunCheckpoint.saved(Path(), ledger, choice.masters), sizes[-1]
            most = max(most, sum(bytes_at[step] for step in on_disk))
            for step in deletable([*on_disk.values()], ledger, keep):
                del on_disk[step]
    mean_age = aged / NUM_SAVES / model.total
    setback = 0.0 if saves_masters(policy) else mean_age
    return SimulatedSaves(tuple(sizes), mean_age, oldest, most, setback, tuple(on_rank_0))


def cost_of(schedule: SimulatedSaves, machine: Hardware, *, in_background: bool, save_steps: int | None = None) -> Cost:
    """Return what a schedule costs, at the best interval unless one is given.

    A save stops training until its files are written, or in the background makes steps slower until then; the next one
    begins when it is written. Of the period p, saves take C / p and failures (a p + b) / M, which is least at
    sqrt(C M / a); a is a half without setbacks, which is Young's formula (1974).
    """
    publish_s = schedule.mean / machine.write_bytes_per_s
    save_s, least_s = publish_s, 0.0
    if in_background:
        save_s, least_s = machine.slowdown * publish_s, schedule.largest / machine.write_bytes_per_s
    periods_lost = 0.5 + LASTING * schedule.setback
    if save_steps is None:
        best_s = math.sqrt(save_s * machine.mtbf_s / periods_lost) - save_s
        save_steps = max(1, math.ceil(least_s / machine.step_s), round(best_s / machine.step_s))
    period_s = save_steps * machine.step_s + save_s
    lost_s = periods_lost * period_s + (publish_s if in_background else 0.0)
    time_lost = min(1.0, save_s / period_s + lost_s / machine.mtbf_s)
    return Cost(in_background, save_s, publish_s, save_steps, period_s, lost_s, time_lost)


def to_json(
    model: ModelSize, machine: Hardware, keep: int, schedules: Mapping[str, tuple[SimulatedSaves, tuple[Cost, ...]]]
) -> dict[str, Any]:
    content = {
        "model": model.name,
        "num_params": model.total,
        "num_parts": len(model.parts),
        "mesh": dict(model.spread.mesh) if model.spread else None,
        "ranks_writing": model.spread.num_writing if model.spread else None,
        "saves": NUM_SAVES,
        "keep": keep,
        "machine": machine,
        "policies": [
            {
                "policy": policy,
                "bytes_mean": schedule.mean,
                "bytes_largest": schedule.largest,
                "bytes_on_disk": schedule.on_disk,
                "bytes_on_rank_0": schedule.on_rank_0_mean,
                "oldest_part_saves": schedule.oldest,
                "mean_age_saves": schedule.mean_age,
                "setback_saves": schedule.setback,
                "costs": costs,
            }
            for policy, (schedule, costs) in schedules.items()
        ],
    }
    return document("policy/2", content)
