"""Masters of 24 bits as compressed differences from those of an earlier save, ``D24``.

Each block of elements is a frame of zstd. It holds the difference of each element's ``F24`` pattern, numbered in the
order of the values, from that of the same element in the other save: modulo 2 ** 24, with the sign in the lowest bit
(zigzag), first the low bytes of all elements, then the middle ones, then the high ones. -0.0 has a number of its own,
so that every pattern comes back, also that of a NaN. `storage.casts` computes them.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from llmtailor.model.roles import BLOCKS, D24

ELEMENTS: Final = BLOCKS[D24].elements
SETTINGS: Final = {"compression_level": 1, "hash_log": 10, "min_match": 7, "write_checksum": True}
"""Of zstd. Higher levels take up to 18 times as long, for a tenth fewer bytes at best, and shorter matches longer for
hardly any: what repeats are runs of zeros."""


class Compressor:
    """Makes frames, for one thread."""

    def __init__(self) -> None:
        import zstandard

        self._zstd = zstandard.ZstdCompressor(compression_params=zstandard.ZstdCompressionParameters(**SETTINGS))

    def frame(self, planes: npt.NDArray[np.uint8]) -> bytes:
        """Return the frame of what `casts.planes_of` returned, of at most `ELEMENTS` elements."""
        made: bytes = self._zstd.compress(planes.data)
        return made


def codes_of(frame: bytes | memoryview) -> npt.NDArray[Any]:
    """Return the differences that a frame holds, as `casts.add_codes` takes them. Raises ValueError for a damaged
    one."""
    import zstandard

    try:
        num_bytes = zstandard.frame_content_size(frame)  # as the file says: nothing larger may be allocated
        if num_bytes % 3 or not 0 < num_bytes <= 3 * ELEMENTS:
            raise ValueError(f"it states {num_bytes} bytes of content")
        content = zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ValueError(f"{error}") from error
    codes = np.zeros((num_bytes // 3, 4), np.uint8)
    codes[:, :3] = np.frombuffer(content, np.uint8).reshape(3, -1).T
    return codes.reshape(-1).view("<u4")
