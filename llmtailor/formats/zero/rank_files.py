"""Lays out the files of all ranks. The pickle of ZeRO-3's is made once for all ranks that are alike.

The files of two ranks of ZeRO-3 differ in which slice of each param they hold, and in what the base keeps besides
states, which is mostly the same for all ranks. So a rank's file has the pickle of the first rank with the same rest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

from llmtailor.checkpoint.index import TrainState
from llmtailor.checkpoint.layout import FileLayout, Piece, Slot
from llmtailor.containers.pickle_writer import write_pickle
from llmtailor.containers.torch_zip import Content, TorchLayout, pickle_content
from llmtailor.formats.zero.files import model_name, optim_name
from llmtailor.formats.zero.rank_trees import ZeroTarget, model_tree, optim_tree, slice_of
from llmtailor.model.states import BUFFER

_MAX_FORMS = 32
"""More than there are: the files of ranks on GPUs have up to 8 forms, one per GPU of a node, and rank 0's differ."""


def optim_states(target: ZeroTarget, train: TrainState, rank: int, cut_as: int) -> dict[str, Any]:
    """Return the tree of a rank's ``optim_states``, with the slices of rank ``cut_as``."""
    return optim_tree(target, cut_as, rest_of(train.optim, rank))


def model_states(target: ZeroTarget, train: TrainState, rank: int, cut_as: int) -> dict[str, Any]:
    """Return the tree of a rank's ``model_states``, or of those of all, with the slices of rank ``cut_as``."""
    rest = dict(rest_of(train.model, rank))
    if "ds_config" in rest:
        rest["ds_config"] = target.adapt_config(rest["ds_config"] or {})
    tied = dict(target.base.tied) if rank == 0 else {}
    return {**model_tree(target, cut_as, rest), "shared_params": tied}


def make_shards(target: ZeroTarget, train: TrainState) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Yield the rank, the path and the object tree of each shard file, with its tensors bound to states."""
    for rank in range(target.layout.world_size):
        name = optim_name(rank, target.precision == "BF16")
        yield rank, f"{target.tag}/{name}", optim_states(target, train, rank, rank)
    for rank in range(target.num_models):
        name = model_name(rank, target.layout.stage)
        yield rank, f"{target.tag}/{name}", model_states(target, train, rank, rank)


def rest_of(trees: Sequence[Mapping[str, Any] | None], rank: int) -> Mapping[str, Any]:
    """Return what a base keeps besides states for a rank: its own, or that of another rank."""
    return trees[rank % len(trees)] or next(tree for tree in trees if tree is not None)


_Rest = Mapping[str, Any]
_TreeOf = Callable[[ZeroTarget, TrainState, int, int], dict[str, Any]]


class RankFiles:
    """The files of all ranks of one checkpoint."""

    def __init__(self, target: ZeroTarget, train: TrainState):
        self.target, self.train = target, train
        self._numels = {name: param.numel for name, param in target.base.params.items()}
        self._digests: dict[int, bytes] = {}
        self._first: dict[tuple[_TreeOf, bytes], int] = {}
        self._form = lru_cache(_MAX_FORMS)(self._make_form)

    def optim(self, folder: str) -> Iterator[FileLayout]:
        """Yield the layout of each rank's ``optim_states``, in a folder."""
        for rank in range(self.target.layout.world_size):
            path = f"{folder}/{optim_name(rank, self.target.precision == 'BF16')}"
            yield TorchLayout(path, partial(self._content, path, rank, optim_states, self.train.optim))

    def model(self, folder: str) -> Iterator[FileLayout]:
        """Yield the layout of each ``model_states``, in a folder."""
        for rank in range(self.target.num_models):
            path = f"{folder}/{model_name(rank, self.target.layout.stage)}"
            yield TorchLayout(path, partial(self._content, path, rank, model_states, self.train.model))

    def _content(self, path: str, rank: int, tree_of: _TreeOf, rests: Sequence[_Rest | None]) -> Content:
        if self.target.layout.stage < 3:
            return pickle_content(path, tree_of(self.target, self.train, rank, rank))
        like = self._first.setdefault((tree_of, self._digest(rest_of(rests, rank))), rank) if rank else 0
        pickled, storages = self._form(tree_of, like)
        return pickled, [self._of_rank(content, rank) if content else content for content in storages]

    def _make_form(self, tree_of: _TreeOf, like: int) -> Content:
        """Return the content of a rank's file, but with the slices of rank 0."""
        return pickle_content(f"rank {like}", tree_of(self.target, self.train, like, 0))

    def _of_rank(self, content: tuple[Piece, ...], rank: int) -> tuple[Piece, ...]:
        """Return a storage with the slices of a rank instead of those of rank 0, which has no padding."""
        pieces: list[Piece] = []
        ranks = self.target.layout.world_size
        for piece in content:
            if not isinstance(piece, Slot):
                pieces.append(piece)
            elif piece.state.kind == BUFFER:
                pieces.append(piece._replace(begin=rank * piece.end, end=(rank + 1) * piece.end))
            else:
                state, dtype, _, part = piece
                numel = self._numels[state.param]
                if (rank + 1) * part <= numel:  # which is so for most: a whole slice
                    pieces.append(Slot(state, dtype, rank * part, (rank + 1) * part))
                else:
                    pieces += slice_of(state, dtype, numel, rank, ranks)
        return tuple(pieces)

    def _digest(self, rest: _Rest) -> bytes:
        """Return what is equal for trees that are written alike."""
        known = self._digests.get(id(rest))
        if known is None:
            data, storages = write_pickle(rest)
            content = repr([storage.content for storage in storages])
            known = self._digests[id(rest)] = hashlib.sha256(data + content.encode()).digest()
        return known
