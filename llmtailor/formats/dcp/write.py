"""Layout of the checkpoints of FSDP trainings, from any base. `read` describes them.

The weights are what an FSDP run trains on. From a ZeRO base they are the fp32 master weights, as nothing else would
keep them: the run should build the model in fp32 (and compute in bf16 by mixed precision). Tied names are stored by
both names, as ``model.state_dict()`` has them.

A loader asks for each option that its own param groups have, so options of torch's AdamW that the base lacks are added
with their defaults. A loader ignores keys that it does not ask for.

verl's ranks, and accelerate's with ``use_dcp=False``, each load a file of their own, see `ranks`. torch compares the
mesh in it with that of the run, so the mesh is the base's, or one of all ranks; its fields are those of torch 2.13.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from llmtailor.checkpoint.index import (
    DCP,
    FSDP,
    FULL,
    RANKS,
    SHARDS,
    VERL,
    CheckpointIndex,
    DcpKeyLayout,
    TensorEntry,
)
from llmtailor.checkpoint.layout import Bytes, FileLayout, LinkLayout
from llmtailor.checkpoint.optimizer import ParamGroup, with_names, without_names
from llmtailor.checkpoint.placement import Absent, Placement
from llmtailor.checkpoint.schema import kinds_by_param, refuse_cuts
from llmtailor.containers.dcp import KeyPath, cut_rows
from llmtailor.containers.dtensor import MESH_FIELDS, DeviceMesh
from llmtailor.containers.safetensors import WeightFile, lay_out_weights
from llmtailor.containers.torch_file import lay_out_torch_file
from llmtailor.containers.unpickle import Ordered, Quantized, state_tensor
from llmtailor.errors import MismatchError, Problem, UnsupportedCheckpoint, some
from llmtailor.formats.dcp.builder import FolderBuilder
from llmtailor.formats.dcp.folder import MODEL_FILE, OPTIMIZER_FILE, SHARDING
from llmtailor.formats.dcp.keys import ADAMW, BUFFERS, GROUPS, STATE, TIED, merge_alike
from llmtailor.formats.dcp.links import Links
from llmtailor.formats.dcp.ranks import EXTRA, MODEL, MODEL_OF_RANK, OPTIMIZER, OPTIMIZER_OF_RANK, verl_file
from llmtailor.formats.dcp.read import MODEL_FOLDER, OPTIMIZER_FOLDER
from llmtailor.formats.torch_states import (
    NO_STATES,
    is_adam,
    keeps_nothing,
    lay_out_master_weights,
    state_nodes,
    step_node,
    written_dtype,
)
from llmtailor.frameworks.files import (
    ENGINE_FILES,
    SCALER,
    TRAINER_STATE,
    VERL_CONFIG,
    is_rng_file,
)
from llmtailor.frameworks.framework import FRAMEWORKS
from llmtailor.frameworks.read import adapters_of
from llmtailor.frameworks.write import (
    LR_SCHEDULER,
    Wanted,
    first_rates,
    is_of_scheduler,
    lay_out_settings,
    lay_out_trainer_files,
    random_states,
    saved_scheduler,
    scheduler_for,
    scheduler_tree,
    synthesize_files,
)
from llmtailor.model.roles import BUFFER, KIND_OF_ROLE, State

_STYLES = {
    FSDP: DcpKeyLayout(("model",), ("optimizer",)),
    DCP: DcpKeyLayout(("model",), ("optim",)),
    VERL: DcpKeyLayout(("model",), ("optimizer",), form=RANKS),
}
"""Of a base that has none of its own"""


@dataclass(frozen=True, slots=True)
class DcpWriter:
    """The writer of a family: ``fsdp``, ``dcp`` or ``verl``."""

    family: str

    def lay_out(self, base: CheckpointIndex, wanted: Wanted) -> tuple[list[FileLayout], list[Problem]]:
        """Return the layouts of a composite's files except the tokenizer's, and notices.

        Raises UnsupportedCheckpoint or MismatchError for a base that can't be stored in this format.
        """
        check_states(base, wanted.layout.groups)
        is_quantized = any(isinstance(value, Quantized) for one in base.sub_groups for value in one.scalars.values())
        if (self.family != DCP or is_quantized) and (problems := refuse_cuts(base, f"--to {self.family}")):
            raise MismatchError(problems)
        style = base.train.dcp if base.train.dcp and base.form.framework == self.family else _STYLES[self.family]
        if style.is_flat and len(merge_alike(wanted.layout.groups)) != len(wanted.layout.groups):
            what = "the checkpoint stores the options of each param, not param groups, so these can't be rebuilt"
            raise MismatchError.at("--groups", what, "leave --groups out")
        if style.form == RANKS:
            _check_mesh(base, wanted.layout.world_size)
        links = Links(wanted.linkable, wanted.layout.world_size) if wanted.linkable is not None else None
        target = _DcpTarget(base, wanted, style, links, self.family)
        if self.family == DCP:
            return self._lay_out_bare(target)
        if self.family == VERL:
            return self._lay_out_verl(target)
        made, notices = synthesize_files(base, wanted)
        dtype = "F32" if base.form.has_masters else None
        own = {FULL: target.whole, RANKS: target.of_ranks}.get(target.style.form, target.folders)
        laid_out = [*made, *own(), *target.linked()]
        layouts = lay_out_trainer_files(base, wanted, laid_out, dtype, {SCALER, *ENGINE_FILES}, has_weights=True)
        return layouts, [*notices, *target.notices()]

    def _lay_out_verl(self, target: _DcpTarget) -> tuple[list[FileLayout], list[Problem]]:
        base, wanted = target.base, target.wanted
        ranks, notices = wanted.layout.world_size, target.notices()
        schedule = scheduler_tree(base, wanted.from_group)
        if base.form.framework != VERL:
            schedule, more = scheduler_for(base, wanted)
            what = "random states and other files of its loader have no counterpart in verl, and are left out"
            notices += [*more, Problem(base.name, what, "no action needed: the run draws other numbers")]
            if (number := len(wanted.layout.groups)) > 1:
                what = (
                    f"its optimizer has {number} param groups, and verl's one: the run that resumes would refuse them"
                )
                raise MismatchError.at(base.name, what, "add --groups one")
        extra = [{"lr_scheduler": schedule, **_rng(base, rank)} for rank in range(ranks)]
        files: list[FileLayout] = [
            lay_out_torch_file(verl_file(EXTRA, ranks, rank), tree) for rank, tree in enumerate(extra)
        ]
        config = json.dumps({"FSDP_version": 2, "world_size": ranks}, indent=4).encode()
        files.append(FileLayout(VERL_CONFIG, (Bytes(config, "made for the number of ranks"),)))
        files += lay_out_settings(base, FRAMEWORKS[VERL].settings)
        return [*target.of_ranks(), *files], notices

    def _lay_out_bare(self, target: _DcpTarget) -> tuple[list[FileLayout], list[Problem]]:
        base, folder = target.base, FolderBuilder("", target.wanted.layout.world_size, target.links)
        folder.counter = int(target.links is not None)  # so that links to moments keep no weights on the disk
        target.add_model(folder)
        folder.counter = 0
        target.add_optimizer(folder)
        target.add_others(folder)
        target.add_roles(folder)
        notices = target.notices()
        lost = [*random_states(base), *(path for path in base.files if path == TRAINER_STATE)]
        if base.form.framework != DCP and (lost or base.partial.inside):
            files = some(lost) if lost else "the trainer state"
            what = f"{files}, config and the like have no place in a DCP folder, and are left out"
            fix = "no action needed: a loop has its own data order and random states; keep the base if you need them"
            notices.append(Problem(base.name, what, fix))
        return [*folder.finish(), *target.linked()], notices


def _rng(base: CheckpointIndex, rank: int) -> dict[str, Any]:
    """Return the random states of a rank of verl; with more ranks than the base has, they repeat."""
    tree = base.train.trees.get(verl_file(EXTRA, base.world_size, rank % base.world_size))
    return {"rng": tree["rng"]} if isinstance(tree, dict) and "rng" in tree else {}


def _check_mesh(base: CheckpointIndex, ranks: int) -> None:
    """Raise UnsupportedCheckpoint for a mesh that can't be written, MismatchError for ranks that don't fit it."""
    mesh = base.train.dcp.mesh if base.train.dcp else None
    if mesh is None:
        return
    if mesh.cuts not in ((0,), (None, 0)):
        what = f"its mesh {' x '.join(mesh.names)} is neither FSDP's nor HSDP's"
        raise UnsupportedCheckpoint.at(base.name, what, "use --to dcp")
    if mesh.fields != MESH_FIELDS:
        odd = some(sorted(mesh.fields ^ MESH_FIELDS))
        what = f"its DTensors are of another torch than 2.13 ({odd} of DeviceMesh), which does not load 2.13's"
        raise UnsupportedCheckpoint.at(base.name, what, "use --to dcp, or save it again with torch 2.13")
    if len(mesh.shape) == 2 and ranks > mesh.shape[1] and ranks % mesh.shape[1]:
        what = f"{ranks} ranks are not a multiple of the {mesh.shape[1]} that its tensors are cut over (HSDP)"
        raise MismatchError.at("--num-gpu", what, f"choose a multiple of {mesh.shape[1]}, or fewer")


def lay_out_model(base: CheckpointIndex) -> list[FileLayout]:
    """Return the layouts of a DCP folder's files with its model alone, cut for as many ranks."""
    target = _DcpTarget(base, Wanted(base.layout), base.train.dcp or _STYLES[DCP])
    folder = FolderBuilder("", base.world_size)
    target.add_model(folder)
    return folder.finish()


def check_states(base: CheckpointIndex, groups: Sequence[ParamGroup]) -> None:
    """Raise UnsupportedCheckpoint for a base whose states torch would not load."""
    problems = []
    kinds, scalars = kinds_by_param(base), base.scalars()
    if adapters_of(base):
        what = "it is a PEFT run, whose checkpoints lack the model below the adapter; FSDP saves the whole model"
        problems.append(Problem(base.name, what, "stay with the Trainer or DeepSpeed"))
    lost = [p.name for p in base.params.values() if p.numel and State(p.name, KIND_OF_ROLE[p.role]) not in base.held]
    if lost and not problems:
        what = f"it does not hold the values of {some(lost)} under the model's own names"
        problems.append(Problem(base.name, what, "use a base that was saved with them"))
    lacking: list[str] = []
    for group in groups:  # the optimizer may keep nothing of a whole one
        without = [param for param in group.params if not (kinds.get(param) or scalars.get(param))]
        lacking += without if len(without) < len(group.params) else []
    if lacking:
        what = f"its optimizer has no states of {some(lacking)} yet, and torch loads none of some params only"
        problems.append(Problem(base.name, what, "keep the format of the base, or use a later checkpoint"))
    if not kinds:
        what = "its optimizer keeps no states, and torch loads no such folder" if keeps_nothing(base) else NO_STATES
        problems.append(Problem(base.name, what, "use a later checkpoint as base, or another format"))
    if problems:
        raise UnsupportedCheckpoint(problems)


@dataclass(frozen=True, slots=True)
class _DcpTarget:
    base: CheckpointIndex
    wanted: Wanted
    style: DcpKeyLayout
    links: Links | None = None
    family: str = DCP

    def linked(self) -> list[LinkLayout]:
        """Return the linked files, once all other files are laid out."""
        return self.links.files() if self.links is not None else []

    def _weights(self) -> Iterator[tuple[str, str, tuple[int, ...], State, bool]]:
        """Yield name, dtype, shape and state of each tensor of the model, and whether it is cut."""
        base = self.base
        order = {name: at for at, name in enumerate(base.train.model_order)}
        names = sorted((*base.params, *base.tied), key=lambda name: order.get(name, len(order)))
        for name in names:
            param = base.params[base.tied.get(name, name)]
            kind = KIND_OF_ROLE[param.role]
            state = State(param.name, kind)
            held = base.held.get(state)
            dtype = held.live_dtype if held and kind == BUFFER else written_dtype(base, held)
            yield name, dtype, param.shape, state, kind != BUFFER and name not in base.train.unclear

    def _place(self, state: State) -> Placement | None:
        """Return where the base has a state, for an output of as many ranks."""
        held = self.base.held.get(state)
        return held.place if held is not None and self.wanted.layout.world_size == self.base.world_size else None

    def add_model(self, folder: FolderBuilder) -> None:
        for name, dtype, shape, state, is_cut in self._weights():
            folder.add_state(
                (*self.style.model, name), state, dtype, shape, name=name, is_cut=is_cut, like=self._place(state)
            )

    def folders(self) -> list[FileLayout]:
        """Return the files of the optimizer's folder, and of the model's, or its shards."""
        ranks = self.wanted.layout.world_size
        optimizer, model = (FolderBuilder(folder, ranks, self.links) for folder in (OPTIMIZER_FOLDER, MODEL_FOLDER))
        self.add_optimizer(optimizer)
        if self.style is self.base.train.dcp:
            self.add_others(optimizer)
        self.add_roles(optimizer)
        if self.style.form == SHARDS:
            return [*self.shards(), *optimizer.finish()]
        self.add_model(model)
        return [*model.finish(), *optimizer.finish()]

    def whole(self) -> list[FileLayout]:
        """Return the model's file, the optimizer's, and weight files for other readers."""
        model = {name: state_tensor(state, dtype, shape) for name, dtype, shape, state, _ in self._weights()}
        layout = self.wanted.layout
        nodes = [{**self.options(group, at), "params": list(group.params)} for at, group in enumerate(layout.groups)]
        optimizer = {"state": state_nodes(self.base, layout), "param_groups": nodes}
        files = [lay_out_torch_file(MODEL_FILE, model), lay_out_torch_file(OPTIMIZER_FILE, optimizer)]
        return [*files, *lay_out_master_weights(self.base)]

    def _mesh(self, rank: int) -> DeviceMesh:
        """Return the mesh as a rank has it: the base's, for as many ranks as are wanted."""
        ranks = self.wanted.layout.world_size
        own = self.base.train.dcp.mesh if self.base.train.dcp else None
        if own is None:  # random states show whether it has trained on GPUs
            rng = [tree for path, tree in self.base.train.trees.items() if is_rng_file(path) and isinstance(tree, dict)]
            on_cpu = rng and not any("cuda" in key for tree in rng for key in tree)
            return DeviceMesh("cpu" if on_cpu else "cuda", ("fsdp",), (ranks,), rank)
        shards = own.shape[-1] if len(own.shape) == 2 else ranks
        shape = (ranks // shards, shards) if ranks > shards else (ranks,)
        groups = own.groups[rank] if shape == own.shape else ()
        return DeviceMesh(own.device, own.names[-len(shape) :], shape, rank, groups)

    def of_ranks(self) -> list[FileLayout]:
        """Return the files of all ranks with their pieces of model and optimizer."""
        ranks, files = self.wanted.layout.world_size, list[FileLayout]()
        for rank in range(ranks):
            paths = MODEL_OF_RANK.format(rank), OPTIMIZER_OF_RANK.format(rank)
            if self.family == VERL:
                paths = verl_file(MODEL, ranks, rank), verl_file(OPTIMIZER, ranks, rank)
            files += [
                lay_out_torch_file(path, tree)
                for path, tree in zip(paths, self._on_rank(self._mesh(rank)), strict=True)
            ]
        return files

    def owned(self, group: ParamGroup, number: int) -> tuple[str, ...]:
        """Return the params of a group of verl's optimizer, which has all of the model, frozen ones too.

        Raises UnsupportedCheckpoint if their order is not known. A base without groups does not say it.
        """
        base = self.base
        known = base.train.dcp.owned[number : number + 1] if base.train.dcp else ()
        if known and set(group.params) <= set(known[0]):
            return known[0]
        frozen = {name for name, param in base.params.items() if param.role == "frozen"}
        if not frozen and not (base.train.dcp and base.train.dcp.is_flat):
            return group.params
        order = base.train.model_order
        if lost := (frozen | {*group.params}) - {*order}:
            what = (
                f"it does not say where in the model {min(lost)} is, and verl numbers the params in the model's order"
            )
            fix = "use a base that was saved with the Trainer or DeepSpeed, and no frozen params"
            raise UnsupportedCheckpoint.at(base.name, what, fix)
        return tuple(name for name in order if name in frozen or name in group.params)

    def _on_rank(self, mesh: DeviceMesh) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what a rank has of the model and of the optimizer."""
        at, shards = mesh.at[-1], mesh.shape[-1]

        def cut(state: State, dtype: str, shape: tuple[int, ...]) -> Any:
            low, high = cut_rows(shape[0], shards)[at]
            local = state_tensor(state, dtype, (high - low, *shape[1:]), low * math.prod(shape[1:]))
            return mesh.wrap(local, dtype, shape)

        model, made = Ordered(), dict[State, Any]()
        for name, dtype, shape, state, is_cut in self._weights():  # tied names share one
            if state not in made:
                made[state] = cut(state, dtype, shape) if is_cut else state_tensor(state, dtype, shape)
            model[name] = made[state]
        layout, states, groups, first = self.wanted.layout, dict[Any, Any](), [], 0
        kinds = kinds_by_param(self.base)
        numbers: dict[str, int | str] = {}
        for number, group in enumerate(layout.groups):
            options, ids = (
                self.options(group, number),
                dict[str, int | str](zip(group.params, group.params, strict=True)),
            )
            if self.family == VERL:
                owned = self.owned(group, number)
                options, ids = with_names(options, owned), {name: at for at, name in enumerate(owned, first)}
            numbers |= ids
            first += len(ids)
            groups.append({**options, "params": [*ids.values()]})
        for param, node in state_nodes(self.base, layout).items():
            shape = self.base.params[param].shape
            for kind, held in kinds.get(param, {}).items():
                if kind in node and held.shape == shape:
                    node[kind] = cut(State(param, kind), written_dtype(self.base, held), shape)
            if node:
                states[numbers[param]] = node
        return model, {"state": states, "param_groups": groups}

    def shards(self) -> list[FileLayout]:
        """Return the safetensors file of each rank."""
        ranks = self.wanted.layout.world_size
        layouts = []
        weights = [*self._weights()]
        for rank in range(ranks):
            tensors, filled, offsets = {}, {}, {}
            for name, dtype, shape, state, is_cut in weights:
                low, high = cut_rows(shape[0], ranks)[rank] if is_cut and shape else (0, shape[0] if shape else 1)
                if low == high or (not is_cut and rank):
                    continue
                sizes = (high - low, *shape[1:]) if shape else ()
                row = self.base.params[state.param].numel // (shape[0] if shape else 1)
                tensors[name] = TensorEntry(dtype, sizes, Absent())
                filled[name] = (state, low * row)
                offsets[name] = {"saved_offsets": [low, *[0] * (len(shape) - 1)] if shape else []}
            metadata = {"DCP_VERSION": "1.0", "format": "pt", SHARDING: json.dumps(offsets)}
            path = f"shard-{rank + 1:05}-model-00001-of-00001.safetensors"
            layouts.append(lay_out_weights(WeightFile(path, tensors, metadata, filled), None))
        return layouts

    def add_optimizer(self, folder: FolderBuilder) -> None:
        base, layout = self.base, self.wanted.layout
        kinds = kinds_by_param(base)
        steps = {param: one.step for one in layout.sub_groups for param in one.params}
        scalars = {param: one.scalars for one in layout.sub_groups for param in one.params}
        for param in (param for group in layout.groups for param in group.params):
            for kind, held in kinds.get(param, {}).items():
                path, state, dtype = self._path(STATE, param, kind), State(param, kind), written_dtype(base, held)
                is_cut = held.shape == base.params[param].shape
                folder.add_state(path, state, dtype, held.shape, is_cut=is_cut, like=self._place(state))
            for kind, value in scalars[param].items():
                folder.add(self._path(STATE, param, kind), value)
            if (step := steps[param]) is not None:
                folder.add(self._path(STATE, param, "step"), step_node(base, step, param))
        for number, group in enumerate(layout.groups):
            options = self.options(group, number)
            if self.style.is_flat:
                for param in group.params:
                    for key, value in options.items():
                        folder.add(self._path(GROUPS, param, key), value)
                continue
            for key, value in {**options, "params": list(group.params)}.items():
                folder.add((*self.style.optimizer, GROUPS, number, key), value)

    def _path(self, section: str, param: str, last: str) -> KeyPath:
        if self.style.is_flat:
            return (*self.style.optimizer, f"{section}.{param}.{last}")
        return (*self.style.optimizer, section, param, last)

    def options(self, group: ParamGroup, number: int) -> dict[str, Any]:
        """Return the options of a param group, with those that its loader asks for."""
        if self.style.is_flat:
            return without_names(group.hyper)
        if self.base.train.dcp:
            return dict(group.hyper)
        own = {}
        # torch's loader asks for it if the run that resumes has a scheduler, which adds it to the groups
        if FRAMEWORKS[self.wanted.client].needs_scheduler or saved_scheduler(self.base) is not None:
            first = first_rates(self.base, self.wanted)[number]
            own["initial_lr"] = group.hyper.get("lr") if first is None else first
        return {**own, **self._defaults(), **group.hyper}

    def _defaults(self) -> dict[str, Any]:
        """Return the options that torch's AdamW has and DeepSpeed's own optimizers don't save; none for others."""
        if not is_adam(self.base):
            return {}
        made = self.base.train.ds_config.get("optimizer")
        if not isinstance(made, dict) or str(made.get("type")).lower() != "adam":
            return ADAMW
        options = made.get("params")
        return {**ADAMW, "decoupled_weight_decay": not options or options.get("adam_w_mode", True) is not False}

    def add_others(self, folder: FolderBuilder) -> None:
        """Add everything except model and optimizer, such as the scheduler's state."""
        tree = scheduler_tree(self.base, self.wanted.from_group)
        scheduler = (*self.style.root, LR_SCHEDULER)
        for key, entry in self.base.train.others.items():
            if not is_of_scheduler(self.base, entry) and key not in (".".join(BUFFERS), ".".join(TIED)):
                folder.add_entry(entry)
        if isinstance(tree, dict):
            for name, value in tree.items():
                folder.add_object((*scheduler, str(name)), value)

    def add_roles(self, folder: FolderBuilder) -> None:
        """Add the names of floating-point buffers, and tied names: both look like frozen params to a later reader.

        With the latter, it takes all others for frozen.
        """
        names = [param.name for param in self.base.params.values() if param.role == "buffer" and param.numel]
        if names:
            folder.add(BUFFERS, names)
        has_others = self.base.tied or any(param.role != "trainable" for param in self.base.params.values())
        if has_others and not self.base.train.unclear:
            folder.add(TIED, dict(self.base.tied))

    def notices(self) -> list[Problem]:
        found = []
        if self.base.form.has_masters:
            what = "its weights are written as the fp32 master weights; loss scale, counters and ds_config are left out"
            found.append(Problem(self.base.name, what, "resume with a model in fp32, and mixed precision as before"))
        added = sorted(self._defaults().keys() - {key for group in self.wanted.layout.groups for key in group.hyper})
        if added and not self.base.train.dcp:
            what = f"its param groups lack options that torch's AdamW asks for: {', '.join(added)}"
            found.append(Problem(self.base.name, what, "no action needed: they get AdamW's defaults"))
        return found
