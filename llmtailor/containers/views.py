"""Views of an open file: a part of it as a file of its own, and one that is read in blocks."""

from __future__ import annotations

from llmtailor.storage.local import SourceFile

_BLOCK = 4096
_MAX_BLOCK = 1 << 20


class Window(SourceFile):
    """Bytes ``start``..``stop`` of an open file, read as a file of their own."""

    def __init__(self, file: SourceFile, start: int, stop: int):
        super().__init__(file.fd, stop - start, file.where, file.fill)
        self.start = start

    def read(self, start: int, stop: int) -> bytes:
        return super().read(self.start + start, self.start + stop)


class Buffered(SourceFile):
    """A file of which headers are read: in blocks, because they lie close together.

    The beginning and the end are kept. Blocks grow where one follows the other, and are small between tensors.
    """

    def __init__(self, file: SourceFile):
        super().__init__(file.fd, file.num_bytes, file.where, file.fill)
        self._file = file
        self._size = _BLOCK
        self._end = self._fetch(max(0, self.num_bytes - _BLOCK) if self.num_bytes > 4 * _BLOCK else 0, self.num_bytes)
        self._begin = self._last = self._end

    def read(self, start: int, stop: int) -> bytes:
        for at, data in (self._last, self._begin, self._end):
            if at <= start and stop <= at + len(data):
                return data[start - at : stop - at]
        after = start - self._last[0] - len(self._last[1])
        self._size = min(2 * self._size, _MAX_BLOCK) if 0 <= after < _BLOCK else _BLOCK
        if stop - start > self._size:
            return self._file.read(start, stop)
        self._last = self._fetch(start, min(start + self._size, self.num_bytes))
        if start == 0:
            self._begin = self._last
        return self._last[1][: stop - start]

    def _fetch(self, start: int, stop: int) -> tuple[int, bytes]:
        return start, self._file.read(start, stop)


class Held(SourceFile):
    """A file whose bytes are in memory."""

    def __init__(self, data: bytes, where: str):
        super().__init__(-1, len(data), where)
        self._data = data

    def read(self, start: int, stop: int) -> bytes:
        return self._data[start:stop]
