"""Checksums of ranges, joined as they come in."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from llmtailor.storage.checksums import combine

_Key = TypeVar("_Key")


class Intervals(Generic[_Key]):
    """CRC-32 of byte ranges per key. Neighbours are joined, so memory does not grow with the number of reads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._from: dict[_Key, dict[int, tuple[int, int]]] = defaultdict(dict)
        """start -> stop, CRC"""
        self._until: dict[_Key, dict[int, int]] = defaultdict(dict)
        """stop -> start"""

    def add(self, key: _Key, start: int, stop: int, crc: int) -> None:
        """Take the CRC of bytes ``start``..``stop``; may be called from any thread."""
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
        """Return size and CRC of what is known from byte 0 on without a gap."""
        return self._from[key].get(0, (0, 0))

    def crc_of(self, key: _Key, start: int, stop: int, read: Callable[[int, int], int]) -> int:
        """Return the CRC of bytes ``start``..``stop``; ``read(begin, end)`` gives that of bytes not yet known."""
        crc, at = 0, start
        for begin, (end, known) in sorted(self._from[key].items()):
            if begin < at or end > stop:
                continue
            if begin > at:
                crc = combine(crc, read(at, begin), begin - at)
            crc, at = combine(crc, known, end - begin), end
        return combine(crc, read(at, stop), stop - at) if at < stop else crc
