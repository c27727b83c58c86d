"""Layout of partial checkpoints: rank shards, files of frozen params, and the partial form of a full checkpoint.

Fragments are cut where the states lie on the ranks, so nothing is gathered. Weights are left out, as in any partial
checkpoint, and so is ``param_slice_mappings``, which follows from the layout.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmtailor.checkpoint.index import CheckpointIndex
from llmtailor.checkpoint.layout import Copy, FileLayout, Piece, Slot, Zeros
from llmtailor.checkpoint.optimizer import part_size
from llmtailor.containers.fields import extent_of
from llmtailor.containers.pickle_nodes import Ordered, TensorView
from llmtailor.containers.safetensors import lay_out_header
from llmtailor.errors import PathIn, UnsupportedCheckpoint
from llmtailor.formats.clients import Client, client_of
from llmtailor.formats.partial.manifest import (
    MANIFEST,
    SCHEMA_BUNDLE,
    TREE,
    BundleFact,
    Manifest,
    ParamFact,
    bundle_name,
    frozen_name,
)
from llmtailor.formats.partial.trees import Known, encode_nodes, placeholder, stored
from llmtailor.formats.plain.write import optimizer_tree
from llmtailor.formats.rng import is_rng_file, rng_file
from llmtailor.formats.trainer import (
    CARD,
    SCALER,
    carry,
    is_weight_file,
    read_config,
)
from llmtailor.formats.zero.files import LATEST, describe_shards, optim_name
from llmtailor.formats.zero.rank_files import make_shards
from llmtailor.formats.zero.rank_trees import ZeroTarget, slice_of
from llmtailor.model.disk_names import AS_IN_MEMORY, naming_of, on_disk
from llmtailor.model.parts import Param, SavedAs
from llmtailor.model.states import BUFFER, FROZEN, ITEMSIZE, MASTER, WEIGHT, State


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of the file, and its content."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    content: tuple[Piece, ...]


@dataclass(slots=True)
class Bundle:
    """A rank shard under construction."""

    path: str
    entries: list[Entry] = field(default_factory=list)
    begin: dict[str, int] = field(default_factory=dict)
    trees: dict[str, str] = field(default_factory=dict)

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
            self.entries.append(Entry(key, view.storage.dtype, view.shape, content))
            return stored(self.path, key)

        self.trees[stock] = to_text(encode_nodes(tree, place))

    def lay_out(self, facts: Mapping[str, str]) -> FileLayout:
        metadata = {
            "schema": SCHEMA_BUNDLE,
            **facts,
            "begin": to_text(self.begin),
            **{TREE + stock: text for stock, text in self.trees.items()},
        }
        return lay_out_tensors(self.path, self.entries, metadata)


def lay_out_tensors(path: str, entries: Iterable[Entry], metadata: Mapping[str, str]) -> FileLayout:
    """Return the layout of a safetensors file; larger items first, so that every tensor is aligned."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    pieces: list[Piece] = []
    at = 0
    for entry in sorted(entries, key=lambda entry: -ITEMSIZE[entry.dtype]):
        stop = at + sum(piece.num_bytes for piece in entry.content)
        header[entry.key] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [at, stop]}
        pieces += entry.content
        at = stop
    return FileLayout(path, (lay_out_header(to_text(header).encode()), *pieces))


def to_text(data: Any) -> str:
    """Return the JSON text used in the headers of rank shards."""
    return json.dumps(data, separators=(",", ":"))


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
    if reason is None and _saved_as(index) is None and any(state.kind == WEIGHT for state in index.held):
        reason = "its weight files hold tensors that are not params of the model, or follow an unknown naming rule"
    if index.variant == "elastic":
        reason = "an elastic checkpoint holds no hyperparameters, so nothing resumes from it"
    if reason:
        raise UnsupportedCheckpoint.at(index.name, f"it can't become partial: {reason}", "leave it as it is")


def lay_out_partial(index: CheckpointIndex, params: Collection[str], save_id: str) -> PartialLayout:
    """Return the layout of a full checkpoint as a partial one with the states of ``params``.

    ``save_id`` is a new random id. Raises SourceError, or what `check_can_be_partial` raises.
    """
    check_can_be_partial(index)
    bundles = [Bundle(bundle_name(rank, index.world_size)) for rank in range(index.world_size)]
    _add_fragments(bundles, index, params)
    for rank, bundle in enumerate(bundles):
        if index.stage == 3 or rank == 0:
            bundle.entries += _buffers(index, rank)
    _add_trees(bundles, index)
    facts = {"save_id": save_id, "step": str(index.global_step), "world_size": str(index.world_size)}
    return PartialLayout(
        bundles=tuple(bundle.lay_out({**facts, "rank": str(rank)}) for rank, bundle in enumerate(bundles)),
        frozen=tuple(_lay_out_frozen(index)),
        carried=tuple(carry(path, fact) for path, fact in index.files.items() if _is_carried(path, client_of(index))),
    )


def describe_partial(
    index: CheckpointIndex,
    save_id: str,
    parts: Mapping[str, str],
    params_of: Mapping[str, Sequence[str]],
    bundles: tuple[BundleFact, ...],
    ledger: Mapping[str, Any],
) -> Manifest:
    """Return the manifest of a partial checkpoint made from a full one.

    ``parts`` are those it holds, with the reasons; ``params_of`` the trained params of each.
    """
    return Manifest(
        step=index.global_step,
        save_id=save_id,
        stage=index.stage,
        world_size=index.world_size,
        precision=index.precision,
        tag=index.tag or "plain",
        parts=parts,
        params_of=params_of,
        params={name: ParamFact(one.shape, one.role, _live_dtype(index, one)) for name, one in index.params.items()},
        tied=index.tied,
        saved_as=_saved_as(index),
        bundles=bundles,
        shards=describe_shards(index.tag, index.stage, index.world_size, index.precision) if index.has_masters else {},
        ledger=ledger,
    )


def _saved_as(index: CheckpointIndex) -> dict[str, tuple[SavedAs, ...]] | None:
    """Return each param's names in the weight files; None if there are none, or they are not all explained."""
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
    """Return a param's dtype in training: under ZeRO the weights', of which the optimizer has fp32 copies."""
    if param.role == "trainable" and index.stage:
        return index.precision
    kind = {"trainable": MASTER, "frozen": FROZEN, "buffer": BUFFER}[param.role]
    return index.held[State(param.name, kind)].dtype


def _is_carried(path: str, client: Client) -> bool:
    made = {LATEST, CARD, MANIFEST, client.optimizer, client.scheduler, SCALER}
    return "/" not in path and path not in made and not is_weight_file(path) and not is_rng_file(path)


def _add_fragments(bundles: list[Bundle], index: CheckpointIndex, params: Collection[str]) -> None:
    """Cut the states as they lie on the ranks. Without DeepSpeed, the first rank shard has all of them."""
    names = (optim_name(rank, index.precision == "BF16") for rank in range(index.world_size))
    rank_of = {f"{index.tag}/{name}": rank for rank, name in enumerate(names)}
    for param, states in trained_states(index).items():
        if param not in params:
            continue
        for state in states:
            held = index.held[state]
            for fragment in held.place.cover(0, held.numel):
                bundle = bundles[rank_of.get(fragment.extent.path, 0)]
                slot = Slot(state, held.dtype, fragment.begin, fragment.end)
                numel = fragment.end - fragment.begin
                bundle.entries.append(Entry(f"{state.kind}/{param}", held.dtype, (numel,), (slot,)))
                bundle.begin[param] = fragment.begin
            if not held.numel:
                bundles[0].entries.append(Entry(f"{state.kind}/{param}", held.dtype, (0,), ()))
                bundles[0].begin[param] = 0


def _buffers(index: CheckpointIndex, rank: int) -> Iterator[Entry]:
    for param in index.params.values():
        if param.role == "buffer":
            state = State(param.name, BUFFER)
            dtype, begin = index.held[state].dtype, rank * param.numel
            slots = (Slot(state, dtype, begin, begin + param.numel),) if param.numel else ()
            yield Entry(f"{BUFFER}/{param.name}", dtype, param.shape, slots)


def _lay_out_frozen(index: CheckpointIndex) -> Iterator[FileLayout]:
    """Yield frozen params: under ZeRO-3 a slice per rank, with padding, as DeepSpeed keeps them; else whole."""
    frozen = {
        param.name: index.held[State(param.name, FROZEN)] for param in index.params.values() if param.role == "frozen"
    }
    ranks = index.world_size if index.stage == 3 else 1
    for rank in range(ranks) if frozen else ():
        entries = []
        for name, held in frozen.items():
            part = part_size(held.numel, ranks)
            content = tuple(slice_of(State(name, FROZEN), held.dtype, held.numel, rank, ranks))
            entries.append(Entry(name, held.dtype, (part,) if index.stage == 3 else held.shape, content))
        yield lay_out_tensors(frozen_name(rank, ranks), entries, {"schema": SCHEMA_BUNDLE})


def _add_trees(bundles: list[Bundle], index: CheckpointIndex) -> None:
    """Add the object trees of all stock files that are not copied, each to the shard of its rank."""

    def add(rank: int, path: str, tree: Any) -> None:
        bundles[rank].add_tree(path, tree, PathIn(index.name, path))

    if index.has_masters:
        for rank, path, tree in make_shards(
            ZeroTarget.of(index, index.layout, index.precision, index.client), index.train
        ):
            outer = tree.get("optimizer_state_dict")
            if outer is not None:  # it follows from the layout
                tree = {**tree, "optimizer_state_dict": {k: v for k, v in outer.items() if k != "param_slice_mappings"}}
            add(rank, path, tree if outer is not None else _model_tree(tree, index, rank))
    else:
        add(0, client_of(index).optimizer, optimizer_tree(index, index.layout))
    owners = {client_of(index).scheduler: 0, **({} if index.has_masters else {SCALER: 0})}
    owners |= {rng_file(rank, index.world_size, index.client): rank for rank in range(index.world_size)}
    for path, rank in owners.items():
        if path in index.train.trees:
            add(rank, path, index.train.trees[path])


def _model_tree(tree: dict[str, Any], index: CheckpointIndex, rank: int) -> dict[str, Any]:
    """Return ``model_states`` with the places of buffers and frozen params in the partial checkpoint."""
    bundle = bundle_name(rank, index.world_size)
    frozen_file = frozen_name(rank, index.world_size) if index.stage == 3 else frozen_name(0, 1)
    module = Ordered(tree["module"].items(), tree["module"].attributes)
    for name in module:
        stored_name = index.tied.get(name, name)
        param = index.params.get(stored_name)
        if param is not None and param.role == "buffer":
            module[name] = Known(stored(bundle, f"{BUFFER}/{stored_name}"))
        elif param is not None and param.role == "frozen" and index.stage < 3:
            module[name] = Known(stored(frozen_file, stored_name))
    fragments = tree.get("frozen_param_fragments")
    if fragments:
        tree["frozen_param_fragments"] = Ordered((name, Known(stored(frozen_file, name))) for name in fragments)
    return {**tree, "module": module}
