"""Layout of partial checkpoints: rank shards, files of frozen params, and the partial form of a full checkpoint.

Fragments are cut where the states lie on the ranks, so nothing is gathered. Weights are left out, as in any partial
checkpoint, and so is ``param_slice_mappings``, which follows from the layout.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from llmtailor.checkpoint.index import (
    DCP,
    ELASTIC,
    FSDP,
    UNIVERSAL,
    CheckpointIndex,
    DcpEntry,
    DcpKeyLayout,
    TensorEntry,
)
from llmtailor.checkpoint.layout import Copy, FileLayout, Slot, Zeros
from llmtailor.checkpoint.optimizer import part_size
from llmtailor.checkpoint.placement import Box, Boxes, arrange
from llmtailor.containers.dcp import cut_rows
from llmtailor.containers.json import extent_of
from llmtailor.containers.unpickle import Ordered, TensorView, make_tensor
from llmtailor.errors import PathIn, UnsupportedCheckpoint, some
from llmtailor.formats.deepspeed.files import describe_shards, optim_name
from llmtailor.formats.deepspeed.write import ZeroTarget, make_shards, slice_of
from llmtailor.formats.partial.json_trees import (
    BundleEntry,
    BundleLayout,
    Known,
    encode_nodes,
    lay_out_tensors,
    placeholder,
    stored,
    to_text,
)
from llmtailor.formats.partial.manifest import (
    KEY_LAYOUT,
    SCHEMA_BUNDLE,
    TREE,
    BundleFact,
    Manifest,
    ParamFact,
    bundle_name,
    frozen_name,
)
from llmtailor.formats.torch_states import optimizer_tree
from llmtailor.frameworks.files import (
    CARD,
    LATEST,
    PARTIAL_MANIFEST,
    SCALER,
    is_of_states,
    is_rng_file,
    is_weight_file,
    rng_file,
)
from llmtailor.frameworks.framework import framework_of
from llmtailor.frameworks.read import adapters_of, read_config
from llmtailor.frameworks.write import carry
from llmtailor.model.dtypes import BLOCKS, D16, FLOATING, PACKED
from llmtailor.model.mergekit_data import AS_IN_MEMORY, naming_of, on_disk
from llmtailor.model.parts import Param, Part, SavedAs
from llmtailor.model.precision import WITHOUT_BASE, Precision
from llmtailor.model.roles import BUFFER, FROZEN, KIND_OF_ROLE, MASTER, WEIGHT, State, is_moment


@dataclass(slots=True)
class Bundle:
    """A rank shard under construction."""

    path: str
    entries: list[BundleEntry] = field(default_factory=list)
    trees: dict[str, str] = field(default_factory=dict)
    _runs: dict[str, tuple[int, list[list[int]]]] = field(default_factory=dict)
    """Key of a tensor of fragments -> its position among the entries, and the first and the last + 1 of each of their
    runs of elements"""
    _boxes: dict[str, Box] = field(default_factory=dict)
    """Param -> the box of it that all of its tensors of fragments here hold"""
    _whole: list[str] = field(default_factory=list)
    """Keys of states that are not elementwise, which are here in their own shapes"""

    def add_whole(self, entry: BundleEntry) -> None:
        """Add a state that is not elementwise."""
        self._whole.append(entry.key)
        self.entries.append(entry)

    def add_box(self, entry: BundleEntry, box: Box) -> None:
        """Add the elements of a state that are a box of its param, not adjacent in it."""
        self._boxes[entry.key.partition("/")[2]] = box
        self.entries.append(entry)

    def add_fragment(self, entry: BundleEntry, begin: int) -> None:
        """Add elements of a state, from ``begin`` on; those of the same key follow each other in one tensor."""
        end = begin + math.prod(entry.shape)
        if entry.key not in self._runs:
            self._runs[entry.key] = len(self.entries), [[begin, end]]
            self.entries.append(entry)
            return
        at, runs = self._runs[entry.key]
        before = self.entries[at]
        shape = (before.shape[0] + end - begin,)
        self.entries[at] = replace(before, shape=shape, content=(*before.content, *entry.content))
        block = BLOCKS.get(entry.dtype)
        whole_blocks = block is None or (runs[-1][1] - runs[-1][0]) % block.elements == 0
        if runs[-1][1] == begin and whole_blocks:
            runs[-1][1] = end
        else:
            runs.append([begin, end])

    def add_tree(self, stock: str, tree: Any, where: str) -> None:
        """Add the object tree of a stock file, with its tensors except those of states, which have fragments.

        Raises SourceError for a tensor that is not contiguous.
        """

        def place(view: TensorView) -> Mapping[str, Any]:
            key, content = f"tree/{len(self.entries)}", view.storage.content
            if not content or any(isinstance(part, (Slot, Zeros)) for part in content):
                return placeholder(view.storage.dtype, view.shape)
            if isinstance(content[0], Copy):
                extent = extent_of(view, key, where)
                content = (Copy(extent),) if extent.num_bytes else ()
            self.entries.append(BundleEntry(key, view.storage.dtype, view.shape, content))
            return stored(self.path, key)

        self.trees[stock] = to_text(encode_nodes(tree, place))

    def lay_out(self, facts: Mapping[str, str]) -> FileLayout:
        begin: dict[str, Any] = {param: asdict(box) for param, box in self._boxes.items()}
        for key, (_, runs) in self._runs.items():
            own = runs[0][0] if len(runs) == 1 else runs
            if begin.setdefault(key.partition("/")[2], own) != own:
                begin[key] = own
        packed = {
            one.key if one.dtype == D16 else one.key.partition("/")[0]: one.dtype
            for one in self.entries
            if one.dtype in PACKED
        }
        metadata = {
            "schema": SCHEMA_BUNDLE,
            **facts,
            "begin": to_text(begin),
            **({"whole": to_text(self._whole)} if self._whole else {}),
            **({"packed": to_text(packed)} if packed else {}),
            **{TREE + stock: text for stock, text in self.trees.items()},
        }
        return BundleLayout(self.path, self.entries, metadata)


@dataclass(frozen=True, slots=True)
class PartialLayout:
    """The files of a partial checkpoint except its manifest, which lists the checksums of the others."""

    bundles: tuple[FileLayout, ...]
    """One per rank"""
    frozen: tuple[FileLayout, ...]
    """Files of frozen params; the same at every step."""
    carried: tuple[FileLayout, ...]
    """Other files from the full checkpoint's root: trainer state, config, tokenizer, .."""

    @property
    def files(self) -> tuple[FileLayout, ...]:
        return (*self.bundles, *self.frozen, *self.carried)


def check_can_be_partial(index: CheckpointIndex) -> None:
    """Raise UnsupportedCheckpoint for a full checkpoint with content that only its weight files hold."""
    reason, only = None, "and have its only master weights"
    for param in index.params.values():
        if param.role == "trainable" and State(param.name, MASTER) not in index.held:
            reason = f"its weight files use other names for {param.name} than the model, {only}"
        elif param.role == "frozen" and State(param.name, FROZEN) not in index.held:
            reason = f"only its weight files hold the frozen {param.name}"
    has_weight_files = index.has_weight_files and any(state.kind == WEIGHT for state in index.held)
    if reason is None and _saved_as(index) is None and has_weight_files:
        reason = "its weight files hold tensors that are not params of the model, or follow an unknown naming rule"
    if len(adapters := adapters_of(index)) > 1:
        reason = f"it has several adapters, {some(adapters)}, of which only the weight files may hold some"
    if index.form.variant == ELASTIC:
        reason = "an elastic checkpoint holds no hyperparameters, so nothing resumes from it"
    if reason:
        raise UnsupportedCheckpoint.at(index.name, f"it can't become partial: {reason}", "leave it as it is")


def lay_out_partial(
    index: CheckpointIndex, params: Collection[str], masters: Collection[str], save_id: str, precision: Precision
) -> PartialLayout:
    """Return the layout of a full checkpoint as a partial one with the states of ``params`` and the masters of
    ``masters``, rounded to ``precision``.

    ``save_id`` is a new random id. Raises SourceError, or what `check_can_be_partial` raises.
    """
    check_can_be_partial(index)
    bundles = [Bundle(bundle_name(rank, index.world_size)) for rank in range(index.world_size)]
    _add_fragments(bundles, index, params, masters, precision)
    for rank, bundle in enumerate(bundles):
        if index.form.stage == 3 or rank == 0:
            bundle.entries += _buffers(index, rank)
    _add_trees(bundles, index)
    facts = {"save_id": save_id, "step": str(index.global_step), "world_size": str(index.world_size)}
    return PartialLayout(
        bundles=tuple(bundle.lay_out({**facts, "rank": str(rank)}) for rank, bundle in enumerate(bundles)),
        frozen=tuple(_lay_out_frozen(index)),
        carried=tuple(carry(path, fact) for path, fact in index.files.items() if _is_carried(path, index)),
    )


def describe_partial(
    index: CheckpointIndex,
    *,
    save_id: str,
    parts: Mapping[Part, str],
    params_of: Mapping[Part, Sequence[str]],
    bundles: tuple[BundleFact, ...],
    ledger: Mapping[str, Any],
    masters: tuple[Part, ...] = (),
) -> Manifest:
    """Return the manifest of a partial checkpoint made from a full one.

    ``parts`` are those it holds, with the reasons; ``masters`` those whose masters alone it holds;
    ``params_of`` the trained params of each.
    """
    tag, shards = "plain", dict[str, Any]()
    if index.form.file_format in (UNIVERSAL, FSDP, DCP):
        shards["framework"] = index.form.file_format
    if index.form.has_masters:
        tag = _zero_target(index).tag
        shards |= describe_shards(tag, index.form.stage, index.world_size, index.precision)
    return Manifest(
        step=index.global_step,
        save_id=save_id,
        stage=index.form.stage,
        world_size=index.world_size,
        precision=index.precision,
        tag=tag,
        parts=parts,
        params_of=params_of,
        params={name: ParamFact(one.shape, one.role, _live_dtype(index, one)) for name, one in index.params.items()},
        tied=index.tied,
        saved_as=_saved_as(index),
        bundles=bundles,
        shards=shards,
        ledger=ledger,
        masters=masters,
        unclear=tuple(sorted(index.train.unclear)),
    )


def _zero_target(index: CheckpointIndex) -> ZeroTarget:
    return ZeroTarget.of(index, index.layout, index.precision, index.framework)


def _saved_as(index: CheckpointIndex) -> dict[str, tuple[SavedAs, ...]] | None:
    """Return each param's names in the weight files; None if there are none, or they are not all explained."""
    if not index.has_weight_files:
        return None
    weights = {state.param: held.shape for state, held in index.held.items() if state.kind == WEIGHT}
    for naming in (AS_IN_MEMORY, naming_of(str(read_config(index).get("model_type")))):
        found = {name: tuple(on_disk(param, naming)) for name, param in index.params.items()} if naming else {}
        made = {one.name: one.shape for ones in found.values() for one in ones}
        if weights and made == {name: shape for name, shape in weights.items() if name not in index.tied}:
            return found
    return None


def trained_states(index: CheckpointIndex) -> dict[str, list[State]]:
    """Return the optimizer's states of each trained param: master and moments, in a fixed order."""
    states: dict[str, list[State]] = {name: [] for group in index.group_params for name in group}
    for state in index.held:
        if state.param in states and state.kind != WEIGHT:
            states[state.param].append(state)
    return states


def _live_dtype(index: CheckpointIndex, param: Param) -> str:
    """Return a param's dtype in training: under ZeRO that of the weights; the optimizer has fp32 copies."""
    if param.role == "trainable" and index.form.stage:
        return index.precision
    return index.held[State(param.name, KIND_OF_ROLE[param.role])].live_dtype


def _is_carried(path: str, index: CheckpointIndex) -> bool:
    framework = framework_of(index)
    made = {LATEST, CARD, PARTIAL_MANIFEST, framework.optimizer, framework.scheduler, SCALER}
    is_ours = path in made or is_of_states(path) or is_weight_file(path) or is_rng_file(path)
    if path.startswith(tuple(filter(None, adapters_of(index).values()))):
        return not is_weight_file(path.rpartition("/")[2])
    return "/" not in path and not is_ours


def _add_fragments(
    bundles: list[Bundle],
    index: CheckpointIndex,
    params: Collection[str],
    masters: Collection[str],
    precision: Precision,
) -> None:
    """Cut the states as they are stored on the ranks; rank 0 gets those that are not cut.

    FSDP, universal and other DCP checkpoints are cut by rows, as FSDP2 does, and so is what is cut along columns.
    """
    names = (optim_name(rank, index.precision == "BF16") for rank in range(index.world_size))
    rank_of = {name: rank for rank, name in enumerate(names)}

    def cut(held: TensorEntry) -> Iterator[tuple[int, int, int]]:
        if index.form.file_format in (UNIVERSAL, FSDP, DCP) or isinstance(held.place, Boxes):
            rows = held.shape[0] if held.shape else 1
            of_rank = cut_rows(rows, index.world_size) if held.numel else ()
            row = held.numel // max(rows, 1)
            yield from ((rank, low * row, high * row) for rank, (low, high) in enumerate(of_rank) if low < high)
        elif held.is_all_zero:
            yield 0, 0, held.numel
        else:
            for fragment in held.place.cover(0, held.numel):
                yield rank_of.get(fragment.extent.path.rpartition("/")[2], 0), fragment.begin, fragment.end

    for param, states in trained_states(index).items():
        dtypes = precision.dtypes([state.kind for state in states], with_moments=param in params)
        for state in states:
            if param not in params and (param not in masters or is_moment(state.kind)):
                continue
            held = index.held[state]
            if held.shape != index.params[param].shape or held.dtype not in FLOATING:
                slots = (Slot(state, held.dtype, 0, held.numel),) if held.numel else ()
                bundles[0].add_whole(BundleEntry(f"{state.kind}/{param}", held.dtype, held.shape, slots))
                continue
            dtype = dtypes.get(state.kind, held.dtype) if held.dtype == "F32" else held.dtype
            dtype = WITHOUT_BASE.get(dtype, dtype)
            for rank, first, last in cut(held):
                parts = [(first, last)]
                if dtype in BLOCKS and not held.is_all_zero:  # blocks are made within a fragment of the source
                    parts = [(one.begin, one.end) for one in arrange(held.place, first, last)]
                for begin, end in parts:
                    slot = Slot(state, dtype, begin, end)
                    entry = BundleEntry(f"{state.kind}/{param}", dtype, (end - begin,), (slot,))
                    bundles[rank].add_fragment(entry, begin)
            if not held.numel:
                bundles[0].add_fragment(BundleEntry(f"{state.kind}/{param}", held.dtype, (0,), ()), 0)


def _buffers(index: CheckpointIndex, rank: int) -> Iterator[BundleEntry]:
    for param in index.params.values():
        if param.role == "buffer":
            state = State(param.name, BUFFER)
            dtype, begin = index.held[state].dtype, rank * param.numel
            slots = (Slot(state, dtype, begin, begin + param.numel),) if param.numel else ()
            yield BundleEntry(f"{BUFFER}/{param.name}", dtype, param.shape, slots)


def _lay_out_frozen(index: CheckpointIndex) -> Iterator[FileLayout]:
    """Yield frozen params: under ZeRO-3 a slice per rank, with padding, as DeepSpeed keeps them; else whole."""
    frozen = {
        param.name: index.held[State(param.name, FROZEN)] for param in index.params.values() if param.role == "frozen"
    }
    ranks = index.world_size if index.form.stage == 3 else 1
    for rank in range(ranks) if frozen else ():
        entries = []
        for name, held in frozen.items():
            part = part_size(held.numel, ranks)
            content = tuple(slice_of(State(name, FROZEN), held.dtype, held.numel, rank, ranks))
            entries.append(BundleEntry(name, held.dtype, (part,) if index.form.stage == 3 else held.shape, content))
        yield lay_out_tensors(frozen_name(rank, ranks), entries, {"schema": SCHEMA_BUNDLE})


def _add_trees(bundles: list[Bundle], index: CheckpointIndex) -> None:
    """Add the object trees of all stock files that are not copied, each to the shard of its rank."""

    def add(rank: int, path: str, tree: Any) -> None:
        bundles[rank].add_tree(path, tree, PathIn(index.name, path))

    if index.form.has_masters:
        for rank, path, tree in make_shards(_zero_target(index), index.zero.engine):
            outer = tree.get("optimizer_state_dict")
            if outer is not None:  # it follows from the layout
                tree = {**tree, "optimizer_state_dict": {k: v for k, v in outer.items() if k != "param_slice_mappings"}}
            add(rank, path, tree if outer is not None else _model_tree(tree, index, rank))
    else:
        add(0, framework_of(index).optimizer, optimizer_tree(index, index.layout, is_partial=True))
    if index.dcp is not None:
        add(0, KEY_LAYOUT, _key_layout_tree(index.dcp))
    owners = {framework_of(index).scheduler: 0, **({} if index.form.has_masters else {SCALER: 0})}
    owners |= {rng_file(rank, index.world_size, index.framework): rank for rank in range(index.world_size)}
    for path, rank in owners.items():
        if path in index.train.trees:
            add(rank, path, index.train.trees[path])


def _model_tree(tree: dict[str, Any], index: CheckpointIndex, rank: int) -> dict[str, Any]:
    """Return ``model_states`` with the places of buffers and frozen params in the partial checkpoint."""
    bundle = bundle_name(rank, index.world_size)
    frozen_file = frozen_name(rank, index.world_size) if index.form.stage == 3 else frozen_name(0, 1)
    module = Ordered(tree["module"].items(), tree["module"].attributes)
    for name in module:
        stored_name = index.tied.get(name, name)
        param = index.params.get(stored_name)
        if param is not None and param.role == "buffer":
            module[name] = Known(stored(bundle, f"{BUFFER}/{stored_name}"))
        elif param is not None and param.role == "frozen" and index.form.stage < 3:
            module[name] = Known(stored(frozen_file, stored_name))
    fragments = tree.get("frozen_param_fragments")
    if fragments:
        tree["frozen_param_fragments"] = Ordered((name, Known(stored(frozen_file, name))) for name in fragments)
    return {**tree, "module": module}


def _key_layout_tree(style: DcpKeyLayout) -> dict[str, Any]:
    return {
        "model": style.model,
        "optimizer": style.optimizer,
        "is_flat": style.is_flat,
        "form": style.form,
        "others": [_entry_tree(entry) for entry in style.others.values()],
    }


def _entry_tree(entry: DcpEntry) -> dict[str, Any]:
    if not entry.is_tensor:
        return {"path": entry.path, "object": entry.content}
    dtype, shape, boxes = entry.content
    tensors = [
        (offsets, sizes, make_tensor(dtype, sizes, (Copy(extent),) if extent.num_bytes else ()))
        for offsets, sizes, extent in boxes
    ]
    return {"path": entry.path, "dtype": dtype, "shape": shape, "boxes": tensors}
