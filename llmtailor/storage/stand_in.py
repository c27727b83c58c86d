"""Folders whose files' bytes are elsewhere: which paths these are, and where to get the bytes.

Empty unless a URL was opened; see `storage.remote`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol


class Remote(Protocol):
    """What a stand-in stands for. Its methods raise OSError, or StorageError if the store doesn't answer."""

    url: str
    root: Path
    """The stand-in"""

    def holds(self, name: str) -> bool:
        """Return whether the store has a file of this name. An output in the making is in the stand-in only."""
        ...

    def fill(self, name: str, start: int, stop: int) -> None:
        """Get bytes of a file into its stand-in, where they stay."""
        ...

    def fetch(self, name: str, start: int, stop: int) -> bytes:
        """Return bytes of a file."""
        ...

    def stream(self, name: str, start: int, stop: int) -> Iterator[bytes]:
        """Yield bytes of a file in order, with some of them ahead."""
        ...

    def put(self, name: str, source: Path, crc: int, on_read: Callable[[int], None] = lambda num_bytes: None) -> None:
        """Write a local file to the store, and read it back; ``on_read`` is called with numbers of bytes.

        Raises StorageError if the store returns something else than bytes of this CRC-32.
        """
        ...

    def put_bytes(self, name: str, data: bytes) -> None:
        """Write a small file to the store."""
        ...

    def remove(self, names: Iterable[str]) -> None:
        """Remove files from the store, but not their stand-ins."""
        ...

    def list_once(self) -> None:
        """Make the stand-in's files those that are there, unless that was done."""
        ...

    def list(self) -> None:
        """Make the stand-in's files those that are there now."""
        ...


UPLOADING = "llmtailor-uploading"
"""A file that is in a folder of a store while the others are uploaded: a JSON list of their names"""
STORE_WORKERS = 8
"""Files that are read from or written to stores at once"""
stand_ins: dict[Path, Remote] = {}
"""By root"""


def stand_in_of(path: Path) -> tuple[Remote, str] | None:
    """Return what a path stands for: the store's folder, and the name in it; None for a path of this machine."""
    for root, remote in stand_ins.items():
        if path == root or root in path.parents:
            return remote, "" if path == root else str(path.relative_to(root))
    return None


def served_by(path: Path) -> tuple[Remote, str] | None:
    """Return the store that has the bytes of a file, and its name there; None if they are on this machine."""
    found = stand_in_of(path)
    return found if found is not None and found[0].holds(found[1]) else None


def see(path: Path) -> Path:
    """Return the path; of a stand-in, list its folder if that was not done. Raises StorageError."""
    if found := stand_in_of(path):
        found[0].list_once()
    return path


def location_of(path: Path) -> str:
    """Return a path as a user would write it: the URL, if it is a stand-in."""
    found = stand_in_of(path)
    return str(path) if found is None else f"{found[0].url}/{found[1]}".rstrip("/")


def with_urls(text: str) -> str:
    """Return a text in which paths of stand-ins are URLs."""
    for root, remote in stand_ins.items():
        text = text.replace(str(root), remote.url)
    return text


def with_tag(path: Path) -> Path:
    """Return the tag folder that ``DIR@TAG`` names; any other path as it is."""
    folder, _, tag = path.name.rpartition("@")
    if not folder or not tag or path.exists():
        return path
    named = path.parent / folder / tag
    return named if named.is_dir() else path


def locate(location: str) -> Path:
    """Return the path of a location: the stand-in, if it is a URL that was opened."""
    for root, remote in stand_ins.items():
        if location == remote.url or location.startswith(f"{remote.url}/"):
            return root / location[len(remote.url) :].strip("/")
    return Path(location)
