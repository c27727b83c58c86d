"""Has the system fetch bytes of a file before they are read.

By itself Linux reads 128 KiB ahead, and a reader that sums and writes in between waits for the disk again and again.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress

AHEAD_BYTES = 32 << 20
_MIN_BYTES = 128 << 10


class Ahead:
    """Bytes ``start``..``stop`` of an open file that will be read in order; without ``stop``, all from ``start`` on."""

    def __init__(self, fd: int, start: int, stop: int | None = None) -> None:
        self._fd, self._asked = fd, start
        self._stop = sys.maxsize if stop is None else stop
        self._wanted = start if self._stop - start > _MIN_BYTES else self._stop

    def reached(self, at: int) -> None:
        """Take note that the bytes before ``at`` have been read; call it before each read."""
        if at >= self._wanted and self._asked < self._stop:
            count = min(AHEAD_BYTES, self._stop - self._asked)
            with suppress(OSError):  # it is only a hint
                os.posix_fadvise(self._fd, self._asked, count, os.POSIX_FADV_WILLNEED)
            self._asked += count
            self._wanted = self._asked - AHEAD_BYTES // 2
