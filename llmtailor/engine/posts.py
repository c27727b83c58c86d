"""What the ranks of a shared merge tell each other: one small file per rank, in the folder of the merge.

Every rank sees this folder anyway, so there is no port to open, no host to find, and nothing to import. A file is
written in place: it keeps its blocks, so a rank can still say that the disk is full. NFS shows a file as it is when it
is opened, and makes one anew where it remembers that there is none; that is why reading creates it.
"""

from __future__ import annotations

import json
import os
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

_ROOM = 4096
"""Bytes of a file, unless there is more to say"""
_SHORT = 300


class Posts:
    """The files of all ranks in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, rank: int, content: dict[str, Any]) -> None:
        """Replace what a rank says; nothing happens if the disk refuses, which the others notice as silence."""
        for texts in (content, _shortened(content)):
            with suppress(OSError):
                fd = os.open(self.folder / str(rank), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
                try:
                    data = json.dumps(texts).encode()
                    framed = b"%08x" % zlib.crc32(data) + b"%08x" % len(data) + data
                    if os.pwrite(fd, framed.ljust(_ROOM), 0) >= len(framed):
                        return
                finally:
                    os.close(fd)

    def read(self, rank: int) -> dict[str, Any] | None:
        """Return what a rank says; None if it says nothing, or is just writing. Raises FileNotFoundError.

        That is raised if the folder is gone; other errors of the disk count as silence.
        """
        try:
            fd = os.open(self.folder / str(rank), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                head = os.pread(fd, 16, 0)
                length = int(head[8:16] or b"0", 16)
                data = os.pread(fd, length, 16)
            finally:
                os.close(fd)
        except FileNotFoundError:
            raise
        except (OSError, ValueError):
            return None
        if not length or len(data) != length or b"%08x" % zlib.crc32(data) != head[:8]:
            return None
        content = json.loads(data)
        return content if isinstance(content, dict) else None


def _shortened(content: dict[str, Any]) -> dict[str, Any]:
    """Return a content that fits the room of its file."""
    few = [{name: text[:_SHORT] for name, text in one.items()} for one in content.get("problems", ())[:2]]
    return {**content, "problems": few}
