"""CRC-32, the checksum of zip files, the digests built from it, and XXH3 for whole files.

CRCs of adjacent runs combine into the CRC of the whole. So the checksum of a state does not depend on how it is split
across files and ranks, and one pass over the bytes serves the zip records, the files and the states.
"""

from __future__ import annotations

import hashlib
import threading
from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

from isal import isal_zlib  # several times faster than zlib's own
from xxhash import xxh3_128

from llmtailor.model.roles import State

_GAPS = 64 << 10
"""Bytes of a range that are read only to compare it, as long as the others were read anyway; or a 64th of it"""
DIGEST = "xxh3_128"
"""The digest of whole files for ``--checksum``: 128 bits at memory speed; `xxhsum -H2` prints the same"""


def new_digest() -> xxh3_128:
    return xxh3_128()


def crc32(data: bytes | memoryview, value: int = 0) -> int:
    """Return the CRC-32 of ``data``, continuing from ``value``."""
    return int(isal_zlib.crc32(data, value))


def combine(first: int, second: int, second_len: int) -> int:
    """Return the CRC-32 of two runs of bytes, the second ``second_len`` long, from the CRC-32 of each."""
    return int(isal_zlib.crc32_combine(first, second, second_len))


def part_digest(states: Iterable[tuple[State, int, int]]) -> str:
    """Return the digest of a part from (state, number of bytes, CRC-32) of its states.

    It is the SHA-256 over one line per state, sorted: ``kind TAB param TAB bytes TAB crc32 as 8 hex digits LF``.
    It detects accidents, not attacks: the underlying CRCs are not a cryptographic hash.
    """
    lines = sorted(f"{state.kind}\t{state.param}\t{num_bytes}\t{crc:08x}\n" for state, num_bytes, crc in states)
    return "crc32-sha256:" + hashlib.sha256("".join(lines).encode()).hexdigest()


_Key = TypeVar("_Key")


class Intervals(Generic[_Key]):
    """CRC-32 of byte ranges per key. Adjacent ranges are joined, so memory does not grow with the number of reads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._from: dict[_Key, dict[int, tuple[int, int]]] = defaultdict(dict)
        """start -> stop, CRC"""
        self._until: dict[_Key, dict[int, int]] = defaultdict(dict)
        """stop -> start"""

    def add(self, key: _Key, start: int, stop: int, crc: int) -> None:
        """Add the CRC of bytes ``start``..``stop``; may be called from any thread."""
        with self._lock:
            starts, stops = self._from[key], self._until[key]
            if start >= stop or start in starts or stop in stops:
                return
            if start in stops:
                begin = stops.pop(start)
                _, before = starts.pop(begin)
                start, crc = begin, combine(before, crc, stop - start)
            if stop in starts:
                end, after = starts.pop(stop)
                del stops[end]
                crc, stop = combine(crc, after, end - stop), end
            starts[start] = (stop, crc)
            stops[stop] = start

    def __iter__(self) -> Iterator[_Key]:
        return iter(self._from)

    def whole(self, key: _Key) -> tuple[int, int]:
        """Return size and CRC of the known bytes from byte 0 to the first gap."""
        return self._from[key].get(0, (0, 0))

    def crc_of(self, key: _Key, start: int, stop: int, read: Callable[[int, int], int]) -> int:
        """Return the CRC of bytes ``start``..``stop``; ``read(begin, end)`` returns that of unknown bytes."""
        crc, at = 0, start
        for begin, (end, known) in sorted(self._from[key].items()):
            if begin < at or end > stop:
                continue
            if begin > at:
                crc = combine(crc, read(at, begin), begin - at)
            crc, at = combine(crc, known, end - begin), end
        return combine(crc, read(at, stop), stop - at) if at < stop else crc


class Taken(Generic[_Key]):
    """CRC-32 of the ranges that were read of some files; of others, nothing is kept."""

    def __init__(self, wanted: Iterable[_Key]) -> None:
        self._rows = {key: array("Q") for key in wanted}
        self._lock = threading.Lock()

    def add(self, key: _Key, start: int, stop: int, crc: int) -> None:
        """Add the CRC of bytes ``start``..``stop``; may be called from any thread."""
        if key in self._rows and start < stop:
            with self._lock:
                self._rows[key].extend((start, stop, crc))

    def __getstate__(self) -> dict[_Key, array[int]]:  # for a copy on another rank
        return self._rows

    def __setstate__(self, rows: dict[_Key, array[int]]) -> None:
        self._rows, self._lock = rows, threading.Lock()

    def include(self, others: Taken[_Key]) -> None:
        """Add the CRCs of ranges that another rank has read."""
        for key, rows in others._rows.items():
            self._rows[key].extend(rows)

    def watch(self, key: _Key, start: int, data: Iterator[memoryview]) -> Iterator[memoryview]:
        """Pass on the bytes from ``start`` on, and add their CRC once all were read."""
        if key not in self._rows:
            yield from data
            return
        at, crc = start, 0
        for some in data:
            crc, at = crc32(some, crc), at + len(some)
            yield some
        self.add(key, start, at, crc)

    def wrong(
        self, key: _Key, stated: Iterable[tuple[int, int, int]], read: Callable[[int, int], int], *, is_partly: bool
    ) -> list[tuple[int, int]]:
        """Return which of the ranges (start, stop, CRC-32) that were read have another checksum.

        ``read(start, stop)`` returns that of bytes that were not read. It is called for what lies between the states of
        a file, and if not everything that was read is known (``is_partly``). Other ranges that were read in part can't
        be compared.
        """
        rows = self._rows[key]
        known: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for start, stop, crc in zip(rows[::3], rows[1::3], rows[2::3], strict=True):
            known[start].append((stop, crc))
        starts = sorted(known)
        found = []
        for first, last, wanted in stated:
            at, pieces = first, list[tuple[int, int, int]]()
            for start in starts[bisect_left(starts, first) : bisect_left(starts, last)]:
                fits = [one for one in known[start] if one[0] <= last]
                if start >= at and fits:
                    at, crc = max(fits)
                    pieces.append((start, at, crc))
            missing = last - first - sum(stop - start for start, stop, _ in pieces)
            if not pieces or (missing > max(_GAPS, (last - first) >> 6) and not is_partly):
                continue
            at, whole = first, 0
            for start, stop, crc in (*pieces, (last, last, 0)):
                if at < start:
                    whole = combine(whole, read(at, start), start - at)
                whole, at = combine(whole, crc, stop - start), stop
            if whole != wanted:
                found.append((first, last))
        return found
