"""A training in which each expert's elements of a fused param count as a param of their own."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, cast

from llmtailor.model.parts import Piece
from llmtailor.saving.training import Fragment, Training


def in_pieces(training: Training, pieces: Mapping[str, Piece]) -> Training:
    """Return the training with fragments of these pieces, by their names, instead of those of the params."""
    return cast(Training, _InPieces(training, pieces)) if pieces else training


class _InPieces:
    """Has all of `Training`: what is not defined here is that of the training itself."""

    def __init__(self, training: Training, pieces: Mapping[str, Piece]) -> None:
        self._training = training
        self._pieces = pieces
        self._names: dict[str, list[str]] = {}
        for name, piece in pieces.items():
            self._names.setdefault(piece.param, []).append(name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._training, name)

    def fragments(self, params: Collection[str]) -> Iterator[Fragment]:
        wanted = set(params)
        whole = dict.fromkeys(self._pieces[name].param if name in self._pieces else name for name in params)
        yield from (one for one in self._cut(self._training.fragments(list(whole))) if one.param in wanted)

    def masters(self) -> Iterator[Fragment]:
        yield from self._cut(self._training.masters())

    def _cut(self, fragments: Iterable[Fragment]) -> Iterator[Fragment]:
        for one in fragments:
            if one.param not in self._names:
                yield one
                continue
            for name in self._names[one.param]:
                piece = self._pieces[name]
                begin, end = max(one.begin, piece.begin), min(one.begin + one.tensor.numel(), piece.end)
                if begin < end:
                    yield Fragment(name, one.kind, begin - piece.begin, one.tensor[begin - one.begin : end - one.begin])
