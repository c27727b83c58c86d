"""Computes weighted sums of elements of several sources, chunk by chunk, and computes them again as a check."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import partial

from llmtailor.checkpoint.layout import Blend, Plan
from llmtailor.engine.pool import Stop, num_workers, run_all
from llmtailor.engine.streams import BUFFER_BYTES, Sources, changed
from llmtailor.errors import SourceError
from llmtailor.model.states import ITEMSIZE
from llmtailor.storage.checksums import crc32

CHUNK_ELEMENTS = BUFFER_BYTES // 16
"""So that the fp64 sum and a term fit into a core's cache"""


def blended(piece: Blend, sources: Sources, stop: Stop) -> Iterator[bytes]:
    """Yield the bytes of a piece in order. Raises SourceError or StorageError as `Sources.read_into` does."""
    from llmtailor.storage.casts import add  # numpy takes a while

    if not piece.terms:
        for begin in range(0, piece.numel, CHUNK_ELEMENTS):
            yield bytes(min(CHUNK_ELEMENTS, piece.numel - begin) * ITEMSIZE[piece.dtype])
        return
    terms = [sources.chunks(term, CHUNK_ELEMENTS * ITEMSIZE[term.source_dtype]) for term in piece.terms]
    for read in zip(*terms, strict=True):
        stop.check()
        yield add(
            ((data, term.source_dtype, term.factor) for data, term in zip(read, piece.terms, strict=True)), piece.dtype
        )


def sum_again(
    plan: Plan, sums: Sequence[Sequence[tuple[Blend, int]]], files: Collection[tuple[int, str]], stop: Stop
) -> None:
    """Compute sums again, given with the CRC-32 of what was written, as lists that may be computed in parallel.

    ``files``, positions in `Plan.sources` with paths, are those that may have changed. Raises SourceError if one has,
    or StorageError.
    """
    run_all([partial(_sum_again, plan, pieces, files, stop) for pieces in sums], num_workers(), stop)


def _sum_again(plan: Plan, pieces: Sequence[tuple[Blend, int]], files: Collection[tuple[int, str]], stop: Stop) -> None:
    sources = Sources(plan.sources, {}, {})
    for piece, wanted in pieces:
        crc = 0
        for some in blended(piece, sources, stop):
            crc = crc32(some, crc)
        if crc != wanted:
            suspects = {sources.where(one) for one in piece.terms if (one.source, one.extent.path) in files}
            raise SourceError(problem for where in sorted(suspects) for problem in changed(where).problems)
