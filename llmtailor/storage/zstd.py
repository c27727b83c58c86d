"""zstd, level 1: by the standard library where Python has it, else by the package ``zstandard``."""

from __future__ import annotations

import sys
from functools import cache
from types import ModuleType
from typing import Any, Final

from llmtailor.errors import UsageError

_LEVEL: Final = 1
"""Higher levels take longer and save nothing on the differences of masters."""


def check_installed(where: str) -> None:
    """Raise UsageError if there is no zstd."""
    try:
        _library()
    except ImportError as error:
        what = f"compressed masters need zstd, which is not installed: {error}"
        raise UsageError.at(where, what, "pip install zstandard") from error


def compress(data: Any) -> bytes:
    library = _library()
    if library.__name__ == "zstandard":
        return bytes(library.ZstdCompressor(level=_LEVEL).compress(data))
    return bytes(library.compress(data, _LEVEL))


def decompress(data: Any, num_bytes: int) -> bytes:
    """Return the content of a frame, which must have ``num_bytes``. Raises ValueError for any other.

    Its size is checked before memory is allocated, since a few bytes may stand for terabytes.
    """
    library = _library()
    try:
        if library.__name__ == "zstandard":
            stated = library.frame_content_size(data)
            decompressor, limit = library.ZstdDecompressor(max_window_size=max(num_bytes, 1 << 10)), "max_output_size"
        else:
            stated = library.get_frame_info(data).decompressed_size
            window = {library.DecompressionParameter.window_log_max: max(num_bytes.bit_length(), 10)}
            decompressor, limit = library.ZstdDecompressor(options=window), "max_length"
        if stated != num_bytes:
            raise ValueError(f"it states {stated} bytes, not {num_bytes}")
        content = bytes(decompressor.decompress(data, **{limit: num_bytes}))
    except library.ZstdError as error:
        raise ValueError(str(error)) from error
    if len(content) != num_bytes:
        raise ValueError(f"it has {len(content)} bytes, not {num_bytes}")
    return content


@cache
def _library() -> ModuleType:
    """Return the module. Raises ImportError."""
    if sys.version_info >= (3, 14):
        try:
            from compression import zstd
        except ImportError:  # Python was built without it
            pass
        else:
            return zstd
    import zstandard

    return zstandard
