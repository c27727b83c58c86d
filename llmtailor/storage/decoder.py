"""Reading elements that are stored in blocks."""

from __future__ import annotations

from collections.abc import Iterator

from llmtailor.model.dtypes import BLOCKS, D24, Encoding, size_of
from llmtailor.storage import frames, zstd
from llmtailor.storage.casts import from_blocks


class Decoder:
    """Decodes the bytes of an encoding as they come, to fp32, of ``D24`` to the codes of differences."""

    def __init__(self, encoding: Encoding):
        self._dtype, self._skip, self._left, frames = encoding
        self._frames = [*reversed(frames)]
        if self._dtype == D24:
            zstd.check_installed("masters")
        self._rest = b""
        """The start of a block that the last chunk cut"""

    def feed(self, data: bytes | bytearray | memoryview) -> bytes:
        """Return the elements of the blocks that are complete now, and of the last one if all wanted ones are there.

        Raises ValueError for a damaged frame.
        """
        whole = self._rest + bytes(data)
        if self._dtype == D24:
            return b"".join(self._from_frames(whole))
        enough = size_of(self._dtype, self._skip + self._left)
        end = enough if len(whole) >= enough else len(whole) - len(whole) % BLOCKS[self._dtype].num_bytes
        self._rest = whole[end:]
        found = from_blocks(whole[:end], self._dtype)[self._skip :][: self._left]
        self._skip, self._left = 0 if end else self._skip, self._left - len(found)
        return found.tobytes()

    def _from_frames(self, whole: bytes) -> Iterator[bytes]:
        at = 0
        while self._frames and at + self._frames[-1] <= len(whole):
            end = at + self._frames.pop()
            codes = frames.decode(memoryview(whole)[at:end])
            found = codes[self._skip :][: self._left]
            if len(found) < min(self._left, frames.ELEMENTS - self._skip):
                raise ValueError(f"it has {len(codes)} elements")
            at, self._skip, self._left = end, 0, self._left - len(found)
            yield found.tobytes()
        self._rest = whole[at:]
