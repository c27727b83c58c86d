"""From what FSDP trainings save to a `CheckpointIndex`.

Layouts, as seen with torch 2.13, accelerate 1.15 and transformers 5.23::

    fsdp    pytorch_model_fsdp_0/ and optimizer_0/ (DCP folders) beside the Trainer's scheduler.pt, rng_state_R.pth and
            trainer_state.json: accelerate with SHARDED_STATE_DICT, FSDP1 and FSDP2
            shard-R-model-1-of-1.safetensors instead of pytorch_model_fsdp_0/: transformers.distributed
            pytorch_model_fsdp.bin and optimizer.bin instead of both: FULL_STATE_DICT, see `folder`
            pytorch_model_fsdp_0_rankR.bin and optimizer_0_rankR.bin instead of both: use_dcp=False, see `ranks`
    dcp     one DCP folder with everything: {"model", "optim"} of a loop, torchtitan's step-N
    verl    model_, optim_ and extra_state_world_size_W_rank_R.pt, see `ranks`

None of them has separate master weights: the sharded params are what the optimizer updates. FSDP2 with mixed precision
keeps them in fp32 and computes in bf16; a model loaded in bf16 has bf16 params and bf16 moments. So the weights are
also listed as masters. Adam's ``step`` is stored per param, so every param is its own sub-group.

No format states what is frozen. A tensor of the model without optimizer states counts as tied if its elements equal
those of a trained one, as a buffer if it holds integers, and else as frozen, so that it is copied. If several ranks
have pieces of it, it is frozen; else it may be a buffer, which is settled when an output depends on it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from llmtailor.checkpoint.index import (
    DCP,
    FOLDERS,
    FSDP,
    FULL,
    RANKS,
    SHARDS,
    VERL,
    CheckpointIndex,
    DcpEntry,
    DcpKeyLayout,
    Form,
    TensorEntry,
    TrainState,
    buffer_on_ranks,
)
from llmtailor.checkpoint.optimizer import ParamGroup, SubGroup
from llmtailor.checkpoint.placement import AllZero
from llmtailor.checkpoint.step_names import step_of
from llmtailor.codes import Code
from llmtailor.containers.dcp import DATA_FILE, METADATA, SHARD_FILE, KeyPath, mentions
from llmtailor.containers.json import FileTrees, Tensor, get, read_json, read_option, read_step, read_tied
from llmtailor.containers.unpickle import SmallTensor
from llmtailor.errors import (
    COPY_BACK,
    COPY_CHECKPOINT,
    PathIn,
    Problem,
    Problems,
    SourceError,
    UnsupportedCheckpoint,
    attempt,
    damaged,
    some,
)
from llmtailor.findings import ERROR, WARNING, Finding
from llmtailor.formats.dcp.folder import (
    MODEL_FILE,
    OPTIMIZER_FILE,
    Stored,
    list_shards,
    rank_of_file,
    read_folder,
    read_model_file,
    read_optimizer_file,
    read_shards,
)
from llmtailor.formats.dcp.keys import BUFFERS, TIED, Optimizer, carried, check_options, sort_keys, split_model
from llmtailor.formats.dcp.ranks import (
    Folders,
    is_of_ranks,
    is_of_verl,
    models_of_verl,
    read_accelerate_ranks,
    read_verl,
)
from llmtailor.formats.format import Draft, usual_dtype
from llmtailor.formats.optimizer_objects import refuse_objects
from llmtailor.formats.provenance import ManifestFacts, read_manifest
from llmtailor.formats.torch_optimizer import deciding_options
from llmtailor.formats.torch_states import listed_buffers, listed_ties
from llmtailor.frameworks.files import DCP_RECORD, MANIFEST, OPTIMIZER, SCHEDULER, is_rng_file
from llmtailor.frameworks.framework import FRAMEWORKS
from llmtailor.frameworks.read import TrainerFiles, compare_global_step, file_fact, read_trainer_files
from llmtailor.frameworks.scheduler import compare_scheduler, read_scheduler
from llmtailor.frameworks.stock_fields import ADAM_KINDS, TORCH_KINDS, has_adams_options, keeps_as_adam
from llmtailor.model.dtypes import FLOATING, ITEMSIZE
from llmtailor.model.parts import Param
from llmtailor.model.roles import BUFFER, EXP_AVG, FROZEN, MASTER, WEIGHT, State
from llmtailor.storage.local import open_source

_CHECKSUM = re.compile("[0-9a-f]{8}")
_MIXED = "silent: copy the whole checkpoint again; its files come from different saves"


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
        yield Finding(PathIn(name, trainer.client.scheduler), what, _MIXED, Code.STEPS_DIFFER, ERROR)
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


def agree_on_roles(indexes: Sequence[CheckpointIndex]) -> tuple[CheckpointIndex, ...]:
    """Return the indexes; what may be a frozen param or a buffer is what another source says."""
    roles = {
        param.name: param.role
        for index in indexes
        for param in index.params.values()
        if param.name not in index.train.unclear
    }
    buffers = {name for name, role in roles.items() if role == "buffer"}
    return tuple(with_roles(index, {*roles}, buffers) for index in indexes)


def with_roles(index: CheckpointIndex, known: Collection[str], buffers: Collection[str]) -> CheckpointIndex:
    """Return the index with those tensors as buffers that were unclear; of the others that are known, it is clear that
    they are frozen params."""
    settled = index.train.unclear.intersection(known, index.params)
    if not settled:
        return index
    params, held = dict(index.params), dict(index.held)
    for name in settled.intersection(buffers):
        params[name], whole = replace(params[name], role="buffer"), held.pop(State(name, FROZEN), None)
        if whole is None:  # a partial checkpoint may be without frozen params
            continue
        for piece in whole.place.cover(0, whole.numel):  # all ranks resume with the same copy
            copies = (piece.extent,) * index.world_size
            held[State(name, BUFFER)] = buffer_on_ranks(whole.dtype, whole.shape, copies)
    train = replace(index.train, unclear=index.train.unclear - settled)
    return replace(index, params=params, held=held, train=train)


MODEL_FOLDER, OPTIMIZER_FOLDER = "pytorch_model_fsdp_0", "optimizer_0"
_RANK_METADATA = re.compile(r"__[0-9]+\.metadata")
_SAMPLES, _SAMPLE, _CHUNK = 16, 1024, 1 << 20


def detects(root: Path) -> bool:
    """Return whether a folder is, or was, a DCP folder, or a Trainer's FSDP checkpoint with DCP folders."""
    if not root.is_dir():
        return False
    names = {path.name for path in root.iterdir()}
    is_listed = METADATA in names or DCP_RECORD in names
    is_bare = is_listed or any(DATA_FILE.fullmatch(name) or _RANK_METADATA.fullmatch(name) for name in names)
    # beside an optimizer.pt, the first folder is a stray one, which the plain format reports
    has_model = (root / MODEL_FOLDER).is_dir() and OPTIMIZER not in names
    has_folder = is_bare or has_model or (root / OPTIMIZER_FOLDER).is_dir()
    return has_folder or _is_full(root) or is_of_ranks(root) or is_of_verl(root) or bool(models_of_verl(root))


def _is_full(root: Path) -> bool:
    """Return whether model and optimizer are in one file each; accelerate without FSDP also has an optimizer.bin."""
    return (root / MODEL_FILE).exists() and not (root / OPTIMIZER_FOLDER).is_dir()


def read(root: Path, name: str, client: str | None = None) -> Draft:
    """Read a checkpoint with DCP folders; of its tensors only the 4 bytes of each ``step`` are read, and samples of
    tensors that may be tied.

    Raises UnsupportedCheckpoint for a folder without optimizer states, or saved rank by rank without a common metadata.
    """
    problems = Problems()
    if any(_RANK_METADATA.fullmatch(path.name) for path in root.iterdir()):
        what = "saved with use_collectives=False: only the same set of ranks can load it"
        raise UnsupportedCheckpoint.at(name, what, "save it with use_collectives=True")
    in_folders = any((root / folder).is_dir() for folder in (MODEL_FOLDER, OPTIMIZER_FOLDER))
    is_trainers = _is_full(root) or in_folders or is_of_ranks(root)
    folders = None
    manifest = attempt(lambda: read_manifest(root, name), problems)
    linked: Mapping[str, int | None] = manifest.links if manifest is not None else _files_of_save(root, name, problems)
    if is_trainers:
        folders = _read_trainers(root, name, problems, linked)
    elif models := models_of_verl(root):
        what = f"it is a step of verl with the checkpoints of {some(models)}"
        raise UnsupportedCheckpoint.at(name, what, f"name one of them: {name}/{models[0]}")
    elif is_of_verl(root):
        folders = read_verl(root, name, problems)
    elif any(map(SHARD_FILE.fullmatch, linked)):
        folder = read_shards(root, name, problems, linked)
        folders = Folders(folder) if folder else None
    elif not (root / METADATA).exists():
        what = "the file is missing: the save was not finished, or it was lost in a copy"
        problems.add(SourceError.at(PathIn(name, METADATA), what, COPY_BACK, Code.FILE_MISSING))
    elif folder := read_folder(root, "", name, problems, linked):
        folders = Folders(folder)
    if folders is None or not all(folder.has_all_objects for folder in folders.all):  # the param groups, for one
        return Draft(problems)
    trainer = read_trainer_files(FileTrees(root), name, problems, client) if is_trainers else None
    if trainer is not None:  # the weights are in no safetensors file
        findings = tuple(one for one in trainer.findings if one.code is not Code.WEIGHTS_MISSING)
        trainer = replace(trainer, weights={}, findings=findings)
    draft = attempt(lambda: _DcpIndexing(root, name, folders, trainer, manifest, problems).draft(), problems)
    return draft or Draft(problems)


def _files_of_save(root: Path, name: str, problems: Problems) -> dict[str, int | None]:
    """Return the data files of a partial save through DCP, own ones and links, with their checksums, if any."""
    where = PathIn(name, DCP_RECORD)

    def read() -> dict[str, int | None]:
        record = read_json(root / DCP_RECORD, where)
        files = get(record, "files", dict, where)
        is_of_this = any(map(SHARD_FILE.fullmatch, files)) or mentions(  # the former are without .metadata
            root, METADATA, PathIn(name, METADATA), get(record, "save_id", str, where)
        )
        if odd := [path for path, one in files.items() if not (one is None or _CHECKSUM.fullmatch(f"{one}"))]:
            raise damaged(where, f"the checksum of {some(odd)} is none")
        return {path: one and int(one, 16) for path, one in files.items() if is_of_this}

    return (attempt(read, problems) or {}) if (root / DCP_RECORD).is_file() else {}


def _read_trainers(root: Path, name: str, problems: Problems, linked: Mapping[str, int | None]) -> Folders | None:
    is_full = _is_full(root)
    has_shards = not (root / MODEL_FOLDER).is_dir() and bool(list_shards(root))
    there = {path.name for path in root.iterdir()}
    for_resume = {SCHEDULER, OPTIMIZER_FILE if is_full else OPTIMIZER_FOLDER}
    if is_of_ranks(root):
        return read_accelerate_ranks(root, name, problems)
    if not (for_resume & there or any(map(is_rng_file, there))):
        what = "this folder holds weights only, no optimizer state: nothing to resume from"
        fix = "name a full checkpoint (save_only_model must be off)"
        problems.add(SourceError.at(name, what, fix, Code.NO_CHECKPOINT))
        return None
    if is_full:
        optimizer = attempt(lambda: read_optimizer_file(root, name), problems)
        model = attempt(lambda: read_model_file(root, name), problems)
        return Folders(optimizer, model, FULL) if optimizer and model else None
    for folder in (OPTIMIZER_FOLDER, *(() if has_shards else (MODEL_FOLDER,))):
        if not (root / folder).is_dir():
            problems.add(SourceError.at(PathIn(name, folder), "the folder is missing", COPY_BACK, Code.FILE_MISSING))
    if problems.errors:
        return None
    optimizer = read_folder(root, OPTIMIZER_FOLDER, name, problems, linked)
    if has_shards:
        model = read_shards(root, name, problems)
    else:
        model = read_folder(root, MODEL_FOLDER, name, problems, linked)
    return Folders(optimizer, model, SHARDS if has_shards else FOLDERS) if optimizer and model else None


class _DcpIndexing:
    def __init__(
        self,
        root: Path,
        name: str,
        folders: Folders,
        trainer: TrainerFiles | None,
        manifest: ManifestFacts | None,
        problems: Problems,
    ):
        self.root, self.name, self.folders, self.trainer, self.problems = root, name, folders, trainer, problems
        self.manifest = manifest
        in_file = folders.form == FULL
        self.model_where = PathIn(name, MODEL_FILE if in_file else MODEL_FOLDER)
        self.optimizer_where = PathIn(name, OPTIMIZER_FILE if in_file else OPTIMIZER_FOLDER) if folders.model else name
        if folders.form == RANKS and folders.model:
            self.model_where, self.optimizer_where = (PathIn(name, folder.files[0]) for folder in folders.all)

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
        family = FSDP if self.trainer else VERL if self.folders.form == RANKS else DCP
        groups = tuple(ParamGroup(group.params, group.hyper) for group in optimizer.groups)
        index = CheckpointIndex(
            root=self.root,
            name=self.name,
            form=Form(family),
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
            client=DCP if self.trainer else family,
            train=TrainState(
                all("step" in optimizer.tensors.get(param, {}) for param in counted),
                tuple(weights) if self._are_in_order(weights, trained) else (),
                trees=self.folders.extra,
                dcp=DcpKeyLayout(
                    prefix,
                    optimizer.prefix,
                    optimizer.is_flat,
                    self.folders.form,
                    others,
                    self.folders.mesh,
                    self.folders.owned,
                ),
                unclear=frozenset(whole),
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
        where = self.name if self.folders.form == SHARDS else self.model_where
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
        client = self.trainer.client if self.trainer else None
        if self.trainer and client and client.needs_scheduler and client.scheduler not in self.trainer.files:
            what = "the file is missing; without it a resume silently loads neither schedule nor optimizer"
            yield Finding(PathIn(self.name, client.scheduler), what, COPY_BACK, Code.SCHEDULER_MISSING, ERROR)
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


_PARTIAL_LOAD = "a resume fails, or silently restarts it with allow_partial_load; copy the checkpoint again"
