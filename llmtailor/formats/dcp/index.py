"""From the values in DCP folders, or files in their form, to a `CheckpointIndex`.

None of these checkpoints has separate master weights: the sharded params are what the optimizer updates. FSDP2 with
mixed precision keeps them in fp32 and computes in bf16; a model loaded in bf16 has bf16 params and bf16 moments. So the
weights are also listed as masters. Adam's ``step`` is stored per param, so every param is its own sub-group.

No format states what is frozen. A tensor of the model without optimizer states counts as tied if its elements equal
those of a trained one, as a buffer if it holds integers, and else as frozen, so that it is copied. If several ranks
have pieces of it, it is frozen; else it may be a buffer, which is settled when an output depends on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from llmtailor.checkpoint.index import (
    FOLDERS,
    FULL,
    VERL,
    CheckpointIndex,
    DcpEntry,
    DcpKeyLayout,
    Form,
    RankMesh,
    TensorEntry,
    TrainState,
)
from llmtailor.checkpoint.optimizer import ParamGroup, SubGroup
from llmtailor.checkpoint.placement import AllZero
from llmtailor.checkpoint.step_names import step_of
from llmtailor.checkpoint.unclear import with_roles
from llmtailor.codes import Code
from llmtailor.containers.dcp import KeyPath
from llmtailor.containers.json import Tensor, read_option, read_step, read_tied
from llmtailor.containers.unpickle import SmallTensor
from llmtailor.errors import COPY_BACK, COPY_CHECKPOINT, PathIn, Problem, Problems, SourceError, attempt, some
from llmtailor.findings import ERROR, WARNING, Finding
from llmtailor.formats.composite import ManifestFacts
from llmtailor.formats.dcp.folder import DcpCheckpoint, Stored, rank_of_file
from llmtailor.formats.dcp.keys import BUFFERS, TIED, Optimizer, carried, check_options, sort_keys, split_model
from llmtailor.formats.format import Draft, usual_dtype
from llmtailor.formats.optimizer_objects import refuse_objects
from llmtailor.formats.torch_optimizer import deciding_options
from llmtailor.formats.torch_states import listed_buffers, listed_ties
from llmtailor.frameworks.files import DCP_RECORD, MANIFEST, is_rng_file
from llmtailor.frameworks.framework import FRAMEWORKS
from llmtailor.frameworks.read import TrainerFiles, compare_global_step, file_fact
from llmtailor.frameworks.scheduler import compare_scheduler, read_scheduler
from llmtailor.frameworks.stock_fields import ADAM_KINDS, TORCH_KINDS, has_adams_options, keeps_as_adam
from llmtailor.model.dtypes import FLOATING, ITEMSIZE
from llmtailor.model.parts import Param
from llmtailor.model.roles import EXP_AVG, FROZEN, MASTER, WEIGHT, State
from llmtailor.storage.local import open_source

_MIXED = "silent: copy the whole checkpoint again; its files come from different saves"


_SAMPLES, _SAMPLE, _CHUNK = 16, 1024, 1 << 20


_PARTIAL_LOAD = "a resume fails, or silently restarts it with allow_partial_load; copy the checkpoint again"


@dataclass(frozen=True, slots=True)
class Folders:
    """The DCP folders of a checkpoint, or files in their form: one for everything if ``model`` is None."""

    framework: str
    optimizer: DcpCheckpoint
    model: DcpCheckpoint | None = None
    form: str = FOLDERS
    mesh: RankMesh | None = None
    """Of the form `RANKS`"""
    owned: tuple[tuple[str, ...], ...] = ()
    """See `DcpKeyLayout.owned`"""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """verl: file -> its content beside the states, of each rank"""

    @property
    def all(self) -> tuple[DcpCheckpoint, ...]:
        return (self.model, self.optimizer) if self.model else (self.optimizer,)

    @property
    def have_all_objects(self) -> bool:
        """Whether all are decoded, the param groups among them"""
        return all(folder.has_all_objects for folder in self.all)

    @property
    def unreadable(self) -> frozenset[str]:
        return frozenset().union(*(folder.unreadable for folder in self.all))


def scalars_in(kinds: Mapping[str, Stored]) -> set[str]:
    """Return the states of a param, without the step, that are tensors without dimensions if others have some: as for
    `formats.torch_optimizer`, the others are those of a param without dimensions."""
    flat = {kind for kind, stored in kinds.items() if kind != "step" and not stored.held.shape}
    return flat if flat != kinds.keys() - {"step"} else set()


def compare_steps(
    root: Path, name: str, trainer: TrainerFiles | None, optimizer: Optimizer, steps: Mapping[str, float]
) -> Iterator[Finding]:
    """Yield findings on Adam's steps of different saves; a composite and a partial save may mix them.

    ``step`` of each param is in the file of some rank. If the files have different ones, they are of different saves.
    """
    if (root / MANIFEST).is_file() or (root / DCP_RECORD).is_file():
        return
    of_file: dict[str, set[float]] = {}
    for param, step in steps.items():
        if stored := optimizer.tensors.get(param, {}).get("step"):
            path = next(iter(stored.held.place.cover(0, 1))).extent.path
            if path.startswith("../"):  # somebody has composed it
                return
            of_file.setdefault(path, set()).add(step)
    if not steps:
        return
    found = {frozenset(one) for one in of_file.values()}
    if len(found) > 1 and not frozenset.intersection(*found):
        listed = ", ".join(f"{path}: {max(own):g}" for path, own in list(of_file.items())[:3])
        what = f"the files of the ranks have different steps of Adam ({listed})"
        yield Finding(PathIn(name, next(iter(of_file))), what, _MIXED, Code.STEPS_DIFFER, ERROR)
    newest = max(steps.values())
    lags = trainer.step_lags if trainer else frozenset((0,))
    newest += next((lag for lag in lags if trainer and newest + lag == trainer.global_step), 0)
    usual = {newest - lag for lag in lags}
    if lagging := [param for param, step in steps.items() if step < newest and step not in usual]:
        what = f"Adam's step of {some(lagging)} is below {newest:g}"
        yield Finding(name, what, "no action needed if it had no gradients in some steps", Code.STEPS_DIFFER, WARNING)
    counted = trainer.scheduler.num_steps if trainer and trainer.scheduler else None
    if trainer and counted is not None and counted != newest:
        what = f"the schedule is at step {counted}, the optimizer's states are from step {newest:g}"
        yield Finding(PathIn(name, trainer.framework.scheduler), what, _MIXED, Code.STEPS_DIFFER, ERROR)
    if trainer:
        yield from compare_global_step(trainer, root, name, newest)


def find_rounded(index: CheckpointIndex) -> Iterator[Finding]:
    """Yield a finding on weights with fewer bits than their moments: a resume with fp32 params loads them silently."""
    rounded = [
        state.param
        for state, held in index.held.items()
        if state.kind == MASTER
        and (moment := index.held.get(State(state.param, EXP_AVG)))
        and ITEMSIZE[held.dtype] < ITEMSIZE[moment.dtype]
    ]
    if rounded:
        what = f"the weights of {some(rounded)} have fewer bits than their moments: they were rounded"
        fix = "silent: fp32 params would start from rounded values; use a checkpoint that was not rounded"
        yield Finding(index.name, what, fix, Code.WEIGHTS_DTYPE, WARNING)


def draft_of(
    root: Path,
    name: str,
    folders: Folders | None,
    manifest: ManifestFacts | None,
    problems: Problems,
    trainer: TrainerFiles | None = None,
) -> Draft:
    """Return the draft of a checkpoint, empty if its keys don't fit together. Damage is added to ``problems``."""
    if folders is None or not folders.have_all_objects:
        return Draft(problems)
    draft = attempt(lambda: _DcpIndexing(root, name, folders, trainer, manifest, problems).draft(), problems)
    return draft or Draft(problems)


@dataclass(frozen=True, slots=True)
class _DcpIndexing:
    root: Path
    name: str
    folders: Folders
    trainer: TrainerFiles | None
    manifest: ManifestFacts | None
    problems: Problems

    @property
    def optimizer_where(self) -> str:
        return self._where(self.folders.optimizer)

    def _where(self, folder: DcpCheckpoint) -> str:
        return PathIn(self.name, folder.at) if folder.at else self.name

    def draft(self) -> Draft:
        """Return the draft. Raises SourceError or UnsupportedCheckpoint if the keys don't fit together."""
        folder = self.folders.optimizer
        optimizer, rest = sort_keys(folder.tensors, folder.objects, self.optimizer_where, self._option)
        trained = [param for group in optimizer.groups for param in group.params]
        refuse_objects(optimizer.numbers, self.optimizer_where)
        prefix, weights, others = self._weights(rest, trained, optimizer.prefix[:-1])
        self._check_states(optimizer, weights)
        zeroed = optimizer.zeroed
        counted = self._steps(optimizer, [param for param in trained if param not in zeroed])
        steps = counted | dict.fromkeys(zeroed, 0.0)
        listed: Mapping[str, str] | None = None
        if self.folders.form == FULL:
            listed = attempt(lambda: listed_ties(self.root, self.name), self.problems)
        elif entry := others.get(".".join(TIED)):
            listed = read_tied(entry.content, self.optimizer_where)
        if listed is None:  # llmtailor did not write the folder
            tied = self._find_tied(weights, set(trained))
        else:
            tied = {name: stored for name, stored in listed.items() if name in weights and stored in weights}
        ranks = [folder.ranks for folder in self.folders.all]
        paths = [path for folder in self.folders.all for path in folder.files]
        if self.trainer:
            ranks.append(sum(is_rng_file(path) for path in self.trainer.files))
        else:
            paths += sorted(path.name for path in self.root.iterdir())
            settings = FRAMEWORKS[VERL].settings
            paths += [f"{settings}{path.name}" for path in sorted((self.root / settings).glob("*"))]
        params, held = self._hold(optimizer, weights, tied)
        whole = {
            param.name
            for param in params.values()
            if param.role == "frozen" and len([*weights[param.name].held.place.cover(0, param.numel)]) < 2
        }  # FSDP cuts params only
        groups = tuple(ParamGroup(group.params, group.hyper) for group in optimizer.groups)
        index = CheckpointIndex(
            root=self.root,
            name=self.name,
            form=Form(self.folders.framework),
            world_size=max(ranks),
            global_step=self._global_step(others, counted),
            precision=usual_dtype(weights[param].held.dtype for param in trained),
            params=params,
            tied=tied,
            held=held,
            groups=groups,
            sub_groups=tuple(
                SubGroup(number, (param,), steps.get(param), scalars=self._scalars(optimizer, param))
                for number, group in enumerate(groups)
                for param in group.params
            ),
            files={path: fact for path in paths if (fact := file_fact(self.root / path))},
            unreadable=self.folders.unreadable,
            framework=self.folders.framework,
            train=TrainState(
                step_is_tensor=all("step" in optimizer.tensors.get(param, {}) for param in counted),
                model_order=tuple(weights) if self._are_in_order(weights, trained) else (),
                trees=self.folders.extra,
                unclear=frozenset(whole),
            ),
            dcp=DcpKeyLayout(
                model=prefix,
                optimizer=optimizer.prefix,
                is_flat=optimizer.is_flat,
                form=self.folders.form,
                others=others,
                mesh=self.folders.mesh,
                owned=self.folders.owned,
            ),
        )
        buffers = self._buffers(weights, others)
        index = with_roles(index, buffers if listed is None else whole, buffers)
        findings = (*self._findings(optimizer, counted, index.params), *find_rounded(index))
        return Draft(self.problems, replace(index, findings=findings), self.trainer)

    def _are_in_order(self, weights: Mapping[str, Stored], trained: Sequence[str]) -> bool:
        """Whether the weights are listed in the order of the model.

        ``.metadata`` lists what rank 0 has saved, then what only others have: if ranks repeat tensors (HSDP, tensor
        parallelism), torch lets one of them save each.
        """
        if self.folders.form != FOLDERS or self.manifest is not None:
            return True
        firsts = (next(iter(weights[name].held.place.cover(0, 1))) for name in trained if weights[name].held.numel)
        return len({rank_of_file(first.extent.path) for first in firsts}) < 2

    def _option(self, value: Any) -> Any:
        """Return an option of a param group; of a tensor its bytes, if they can be read."""
        if not isinstance(value, Stored):
            return read_option(self.root, value, self.optimizer_where)
        held = value.held
        if not self._is_readable(held):
            return value
        return SmallTensor(held.dtype, held.shape, self._read(held, 0, held.numel))

    def _weights(
        self, rest: Mapping[str, DcpEntry | Stored], trained: list[str], root: KeyPath
    ) -> tuple[KeyPath, dict[str, Stored], dict[str, DcpEntry]]:
        if self.folders.model is None:
            return split_model(rest, trained, self.name, root=root, is_alone=False)
        own: dict[str, DcpEntry | Stored] = dict(self.folders.model.tensors)
        own |= {key: DcpEntry(path, value) for key, (path, value) in self.folders.model.objects.items()}
        where = self._where(self.folders.model)
        prefix, weights, more = split_model(own, trained, where, root=root, is_alone=True)
        return prefix, weights, {**more, **carried(rest)}

    def _scalars(self, optimizer: Optimizer, param: str) -> dict[str, Any]:
        tensors = optimizer.tensors.get(param, {})
        values = optimizer.numbers.get(param, {}) | {kind: tensors[kind] for kind in sorted(scalars_in(tensors))}
        return {kind: self._option(value) for kind, value in values.items() if kind != "step"}

    def _check_states(self, optimizer: Optimizer, weights: Mapping[str, Stored]) -> None:
        problems, kinds_of = [], dict[tuple[tuple[bool, ...], frozenset[str]], list[str]]()
        decided = {param: deciding_options(group.hyper) for group in optimizer.groups for param in group.params}
        options = {option for group in optimizer.groups for option in group.hyper}
        is_elementwise = True
        for param, kinds in optimizer.tensors.items():
            shape = weights[param].held.shape
            kinds_of.setdefault((decided.get(param, ()), _kinds(optimizer, param)), []).append(param)
            scalars = scalars_in(kinds) - (ADAM_KINDS if has_adams_options(options) else set())
            for kind, stored in kinds.items():
                if kind == "step" or kind in scalars or stored.held.shape == shape:
                    continue
                is_elementwise = False
                if kind in ADAM_KINDS or TORCH_KINDS.issuperset(kinds):
                    what = f"{kind} of {param} has shape {list(stored.held.shape)}, the param {list(shape)}"
                    problems.append(Problem(self.optimizer_where, what, COPY_CHECKPOINT, Code.STATE_SIZE))
        for (by, have), params in kinds_of.items() if is_elementwise else ():
            others = [other for decided_by, other in kinds_of if decided_by == by and have < other]
            for kind in sorted({kind for other in others for kind in other - have}):
                what = f"{kind} of {some(params)} is missing"
                problems.append(Problem(self.optimizer_where, what, _PARTIAL_LOAD, Code.STATE_MISSING))
        if problems:
            raise SourceError(problems)

    def _steps(self, optimizer: Optimizer, trained: list[str]) -> dict[str, float]:
        steps, lost, unknown = dict[str, float](), list[str](), list[str]()
        options = {option for group in optimizer.groups for option in group.hyper}
        kinds = frozenset[str]().union(*optimizer.tensors.values(), *optimizer.numbers.values())
        is_counted = "step" in kinds and keeps_as_adam(kinds, options)
        having = (one.items() for one in (optimizer.tensors, optimizer.numbers))
        counted = {_kinds(optimizer, param) for param, states in chain(*having) if "step" in states}
        for number, param in enumerate(trained):
            node: Any = optimizer.numbers.get(param, {}).get("step")
            if stored := optimizer.tensors.get(param, {}).get("step"):
                extent = next(iter(stored.held.place.cover(0, stored.held.numel))).extent
                if extent.path in self.folders.unreadable:
                    unknown.append(param)
                    continue
                node = Tensor(stored.held.dtype, stored.held.shape, extent)
            if node is None:
                if is_counted or (_kinds(optimizer, param) or None) in counted:
                    lost.append(param)
                continue
            steps[param] = read_step(self.root, node, number, self.optimizer_where)
        if lost:
            what = f"the optimizer's step of {some(lost)} is missing"
            raise SourceError.at(self.optimizer_where, what, _PARTIAL_LOAD, Code.STATE_MISSING)
        return steps | dict.fromkeys(unknown, max(steps.values(), default=0.0))  # all are alike but in a composite

    def _find_tied(self, weights: Mapping[str, Stored], trained: set[str]) -> dict[str, str]:
        """Return the names that no optimizer trains, and whose elements equal those of a trained param."""
        tied = {}
        for name, stored in weights.items():
            held = stored.held
            if name in trained or len(held.shape) < 2 or not self._is_readable(held):
                continue
            for param in trained:
                other = weights[param].held
                is_like = (other.dtype, other.shape) == (held.dtype, held.shape)
                if is_like and self._is_readable(other) and self._are_equal(held, other):
                    tied[name] = param
                    break
        return tied

    def _are_equal(self, one: TensorEntry, other: TensorEntry) -> bool:
        """Whether all bytes are equal. Samples are compared first: they differ for most pairs."""
        samples = [(one.numel - min(one.numel, _SAMPLE)) * number // (_SAMPLES - 1) for number in range(_SAMPLES)]
        runs = [(begin, min(begin + _SAMPLE, one.numel)) for begin in samples]
        runs += [(begin, min(begin + _CHUNK, one.numel)) for begin in range(0, one.numel, _CHUNK)]
        return all(self._read(one, begin, end) == self._read(other, begin, end) for begin, end in runs)

    def _is_readable(self, held: TensorEntry) -> bool:
        extents = (fragment.extent for fragment in held.place.cover(0, held.numel))
        return not any(extent.path in self.folders.unreadable for extent in extents)

    def _read(self, held: TensorEntry, begin: int, end: int) -> bytes:
        found = []
        for fragment in held.place.cover(begin, end):
            extent = fragment.extent
            with open_source(self.root / extent.path, PathIn(self.name, extent.path)) as file:
                found.append(file.read(extent.start, extent.stop))
        return b"".join(found)

    def _hold(
        self, optimizer: Optimizer, weights: Mapping[str, Stored], tied: Mapping[str, str]
    ) -> tuple[dict[str, Param], dict[State, TensorEntry]]:
        params: dict[str, Param] = {}
        held: dict[State, TensorEntry] = {}
        trained, zeroed = {param for group in optimizer.groups for param in group.params}, optimizer.zeroed
        for name, stored in weights.items():
            weight = stored.held
            if name in trained:
                params[name] = Param(name, weight.shape, "trainable")
                held[State(name, MASTER)] = weight
                kinds = optimizer.tensors.get(name, {}).items()
                others = {"step", *scalars_in(optimizer.tensors.get(name, {}))}
                held |= {State(name, kind): one.held for kind, one in kinds if kind not in others}
                zeros = TensorEntry(weight.dtype, weight.shape, AllZero())
                held |= {State(name, kind): zeros for kind in zeroed.get(name, ())}
            elif name not in tied:
                params[name] = Param(name, weight.shape, "frozen")
                held[State(name, FROZEN)] = weight
            if name not in tied:
                held[State(name, WEIGHT)] = weight
        return params, held

    def _buffers(self, weights: Mapping[str, Stored], others: Mapping[str, DcpEntry]) -> set[str]:
        """Return the names of buffers: tensors of integers, and those that llmtailor listed."""
        listed = others[key].content if (key := ".".join(BUFFERS)) in others else []
        found = {name for name in listed if isinstance(name, str)} if isinstance(listed, list) else set()
        if self.folders.form == FULL:
            found |= attempt(lambda: listed_buffers(self.root, self.name), self.problems) or set()
        return found | {name for name, stored in weights.items() if stored.held.dtype not in FLOATING}

    def _global_step(self, others: Mapping[str, DcpEntry], steps: Mapping[str, float]) -> int:
        if self.trainer and self.trainer.global_step is not None:
            return self.trainer.global_step
        counter = others.get("train_state.step")  # torchtitan
        if counter is not None and counter.is_tensor and (boxes := counter.content[2]):
            node = Tensor(counter.content[0], counter.content[1], boxes[0][2])
            found = attempt(lambda: read_step(self.root, node, 0, self.name), self.problems)
            return int(found or 0)
        if self.manifest is not None:  # a composite may mix steps, and nothing else says which of them it resumes at
            return self.manifest.global_step
        named = step_of(self.root)
        newest = int(max(steps.values(), default=named or 0))
        return named if named in set(steps.values()) else newest

    def _findings(
        self, optimizer: Optimizer, steps: Mapping[str, float], params: Mapping[str, Param]
    ) -> Iterator[Finding]:
        for folder in self.folders.all:
            yield from folder.findings
        if self.folders.form != FULL:  # torch fills in what is missing from that
            yield from check_options(optimizer, self.optimizer_where)
        framework = self.trainer.framework if self.trainer else None
        if self.trainer and framework and framework.needs_scheduler and framework.scheduler not in self.trainer.files:
            what = "the file is missing; without it a resume silently loads neither schedule nor optimizer"
            yield Finding(PathIn(self.name, framework.scheduler), what, COPY_BACK, Code.SCHEDULER_MISSING, ERROR)
        for path, tree in [*self.folders.extra.items()][
            :1
        ]:  # verl counts its steps as it likes, so only rates are compared
            groups = [group.hyper for group in optimizer.groups]
            where = PathIn(self.name, path)
            yield from compare_scheduler(read_scheduler(tree.get("lr_scheduler")), where, groups, None)
        yield from compare_steps(self.root, self.name, self.trainer, optimizer, steps)
        if zeroed := [*optimizer.zeroed]:
            what = f"the optimizer has no state of {some(zeroed)}, as of a param that had no gradient yet"
            fix = (
                "a resume that trains it fails; resume from a conversion (llmtailor convert), which has zeros at step 0"
            )
            yield Finding(self.optimizer_where, what, fix, Code.STATE_MISSING, ERROR)
        if frozen := [param.name for param in params.values() if param.role == "frozen"]:
            what = f"the optimizer has no states of {some(frozen)}: assumed to be frozen, or buffers"
            fix = "if they were trained, their states are lost: leave this checkpoint out"
            yield Finding(self.optimizer_where, what, fix, Code.STATE_MISSING)


def _kinds(optimizer: Optimizer, param: str) -> frozenset[str]:
    """Return the names of a param's states, without the step."""
    return frozenset((*optimizer.tensors.get(param, ()), *optimizer.numbers.get(param, ()))) - {"step"}
