"""A disk that forgets: what may be left after a power cut, from a trace of what was done.

The model takes POSIX at its word. The bytes of a file last from its fsync on, the names in a folder from the folder's
fsync on, and nothing else must be relied upon. Real file systems mostly keep more, so a cut is looked at in three ways:
`strict` keeps only what must last; `names` keeps all changes of names, but of the bytes only what must last; `zeros`
keeps the names and the lengths, with zeros for bytes that need not last (delayed allocation).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

VIEWS = ("strict", "names", "zeros")
Tree = dict[str, Any]
"""What is in a folder, by name: bytes, or another tree."""


class File:
    def __init__(self, data: bytes = b"", durable: bytes = b"") -> None:
        self.data = bytearray(data)
        self.durable = durable

    def lasts(self) -> bool:
        """Whether all of it is durable."""
        return bytes(self.data) == self.durable

    def view(self, how: str) -> bytes:
        if how == "zeros":
            return self.durable[: len(self.data)] + bytes(max(0, len(self.data) - len(self.durable)))
        return self.durable


class Folder:
    def __init__(self) -> None:
        self.names: dict[str, File | Folder] = {}
        self.durable: dict[str, File | Folder] = {}

    def view(self, how: str) -> Tree:
        return {name: node.view(how) for name, node in (self.durable if how == "strict" else self.names).items()}

    def lasts(self) -> bool:
        """Whether everything in here is durable."""
        return self.names == self.durable and all(node.lasts() for node in self.names.values())


class Disk:
    """A folder at ``root``; what a trace does elsewhere is ignored."""

    def __init__(self, root: Path, tree: Tree) -> None:
        self.root = root
        self.folder = _lasting(tree)
        self.open: dict[int, File | Folder] = {}

    def apply(self, event: tuple[Any, ...]) -> None:
        """Take in an event of the driver's trace."""
        kind, *details = event
        if kind in ("create", "open"):
            path, fd = details
            parent = self._find(Path(path).parent)
            assert isinstance(parent, Folder)
            self.open[fd] = parent.names.setdefault(Path(path).name, File()) if kind == "create" else self.at(path)
        elif kind == "write":
            fd, at, data = details
            self._file(fd).data[at : at + len(data)] = data
        elif kind == "truncate":
            fd, length = details
            del self._file(fd).data[length:]
        elif kind == "fsync":
            self._fsync(*details)
        elif kind == "mkdir":
            self._put(details[0], Folder())
        elif kind in ("unlink", "rmdir"):
            self._take(details[0])
        elif kind == "rename":
            source, target, is_exchange = details
            moved = self._take(source)
            if is_exchange:
                self._put(source, self.at(target))
            self._put(target, moved)
        else:
            assert kind == "close"
            self.open.pop(details[0], None)

    def _fsync(self, fd: int, path: str) -> None:
        node = self._find(Path(path))
        if isinstance(node, Folder):
            node.durable = dict(node.names)
        else:
            file = self.open.get(fd, node)
            assert isinstance(file, File)
            file.durable = bytes(file.data)

    def _find(self, path: Path) -> File | Folder | None:
        node: File | Folder | None = self.folder
        for name in path.relative_to(self.root).parts:
            if not isinstance(node, Folder):
                return None
            node = node.names.get(name)
        return node

    def at(self, path: str) -> File | Folder:
        """Return what is at a path."""
        node = self._find(Path(path))
        assert node is not None, path
        return node

    def _file(self, fd: int) -> File:
        file = self.open[fd]
        assert isinstance(file, File)
        return file

    def _take(self, path: str) -> File | Folder:
        parent = self._find(Path(path).parent)
        assert isinstance(parent, Folder)
        return parent.names.pop(Path(path).name)

    def _put(self, path: str, node: File | Folder) -> None:
        parent = self._find(Path(path).parent)
        assert isinstance(parent, Folder)
        parent.names[Path(path).name] = node


def _lasting(tree: Tree) -> Folder:
    folder = Folder()
    for name, content in tree.items():
        folder.names[name] = _lasting(content) if isinstance(content, dict) else File(content, content)
    folder.durable = dict(folder.names)
    return folder


def read_tree(folder: Path, names: Iterable[str] | None = None) -> Tree:
    """Read what is there."""
    paths = folder.iterdir() if names is None else (folder / name for name in names if (folder / name).exists())
    return {path.name: read_tree(path) if path.is_dir() else path.read_bytes() for path in paths}


def write_tree(tree: Tree, folder: Path) -> None:
    """Write it where nothing of it is yet."""
    for name, content in tree.items():
        if isinstance(content, dict):
            (folder / name).mkdir()
            write_tree(content, folder / name)
        else:
            (folder / name).write_bytes(content)
