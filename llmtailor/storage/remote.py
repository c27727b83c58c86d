"""Checkpoints in object stores: read by ranges, through a local cache folder, and uploaded.

A URL is opened as a local folder, its cache, whose files have the names and sizes of the store's objects but no
content. Whatever lists folders or asks for sizes works on it unchanged. `local.open_source` and `local.OpenFiles`,
through which all files are read, fetch the bytes: headers in blocks, which are kept in the cache, and tensors by exact
ranges, which are not. The files of an output are written next to the cache folder and uploaded one by one.

fsspec (https://filesystem-spec.readthedocs.io) knows the stores: s3, gs, az, hf and more, each with a package of its
own. Ranges of s3, gs and az come through obstore if that is installed, which took half of the CPU time where tried.
"""

from __future__ import annotations

import atexit
import errno
import hashlib
import logging
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PosixPath
from typing import Any, ClassVar, TypeVar

from llmtailor.errors import StorageError, UsageError, masked, some
from llmtailor.storage.checksums import crc32
from llmtailor.storage.threads import Threads

logger = logging.getLogger(__name__)
T = TypeVar("T")

HEADER_BYTES = 256 << 10
"""Headers are fetched in blocks of this size."""
REQUEST_BYTES = 4 << 20
"""The most that one request asks for"""
IN_FLIGHT = 4
"""Requests at once for one output file; `STORE_WORKERS` files are written at once"""
UPLOADING = "llmtailor-uploading"
"""A file that marks an unfinished upload: a JSON list of the names of the folder's files"""
STORE_WORKERS = 8
"""Files that are read from or written to stores at once"""
ATTEMPTS = 5
FIRST_PAUSE_S = 0.5
"""Before the second attempt; each further pause is twice as long"""
_SECRET = 6
"""Characters from which on a part of what was masked in a URL is not shown in messages of stores"""
_ONE_FILE = ".ckpt"
"""The suffix of the URL of a checkpoint that is one file; the URL of a folder may also have it"""
_OF_OBSTORE = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "az": "az", "abfs": "az"}


def is_url(text: str | os.PathLike[str]) -> bool:
    """Return whether a location is a URL such as ``s3://bucket/run``."""
    scheme, separator, _ = str(text).partition("://")
    return bool(separator) and scheme.isidentifier() and scheme not in ("file", "local")


@dataclass(frozen=True, slots=True)
class Object:
    num_bytes: int
    version: str
    """Its ETag or, if the store has none, its time of modification"""

    @property
    def mtime_ns(self) -> int:
        """The modification time of its file in the cache: any number that changes with the content"""
        digest = hashlib.sha256(self.version.encode()).digest()
        return (int.from_bytes(digest[:4], "big") >> 1) * 1_000_000_000  # some file systems have 31 bits for it


class EndsEarly(OSError):
    """A file has fewer bytes than requested."""

    def __init__(self, num_bytes: int):
        super().__init__(errno.ENODATA, f"it ends before byte {num_bytes:,}")


class RemoteFolder:
    """A folder of a store, or a checkpoint that is one file, and its cache.

    The name of the one file is empty. ``root``, the cache folder, is not used before `list`.
    """

    def __init__(self, url: str, root: Path) -> None:
        self.given = url.rstrip("/")
        """What opens it; it may hold a password"""
        self.url = masked(self.given)
        """What is shown and written down"""
        self.root = root
        self._fs, self._path = _file_system(self.given)
        self._fast = _obstore(self.given)
        self._lock = threading.Lock()
        self._present: set[tuple[str, int]] = set()
        self._objects: dict[str, Object] = {}
        self._is_fast = False

    def list(self) -> None:
        """Update the files in the cache to those in the store. Raises StorageError."""
        self._fs.invalidate_cache()
        try:
            found = self._try("list it", self._find)
        except FileNotFoundError:
            found = {}
        if unsized := [name for name, info in found.items() if info["size"] is None]:
            what = f"its listing does not state the size of {some(unsized)}"
            raise StorageError.at(self.url, what, "copy the files to this machine, and name the copy")
        objects = {name: Object(int(info["size"]), _version(info)) for name, info in found.items()}
        for name in self._objects.keys() - objects.keys():
            (self.root / name).unlink(missing_ok=True)
        for name, one in objects.items():
            path = self.root / name
            if _is_safe(name) and (one != self._objects.get(name) or not path.exists()):
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("wb") as file:
                    file.truncate(one.num_bytes)
                os.utime(path, ns=(one.mtime_ns, one.mtime_ns))
                self._present = {(path, block) for path, block in self._present if path != name}
        self._objects = objects

    def _find(self) -> dict[str, dict[str, Any]]:
        if self.given.endswith(_ONE_FILE) and (alone := self._fs.info(self._path))["type"] == "file":
            return {"": alone}
        prefix, found = self._path.strip("/") + "/", self._fs.find(self._path, detail=True)
        named = ((full.strip("/").removeprefix(prefix), info) for full, info in found.items())
        return {name: info for name, info in named if info["type"] == "file" and name and not name.startswith("/")}

    def _at(self, name: str) -> str:
        return f"{self._path}/{name}" if name else self._path

    def holds(self, name: str) -> bool:
        return name in self._objects

    def fill(self, name: str, start: int, stop: int) -> None:
        """Fetch the blocks of a file's bytes into the cache. Raises OSError, StorageError."""
        num_bytes = self._objects[name].num_bytes
        blocks = range(start // HEADER_BYTES, -(-min(stop, num_bytes) // HEADER_BYTES))
        with self._lock:
            missing = [block for block in blocks if (name, block) not in self._present]
            if not missing:
                return
            begin, end = missing[0] * HEADER_BYTES, min((missing[-1] + 1) * HEADER_BYTES, num_bytes)
            data = self.fetch(name, begin, end)
            path = self.root / name
            fact = path.stat()
            with path.open("r+b") as file:
                file.seek(begin)
                file.write(data)
            os.utime(path, ns=(fact.st_mtime_ns, fact.st_mtime_ns))
            self._present |= {(name, block) for block in missing}

    def fetch(self, name: str, start: int, stop: int) -> bytes:
        """Return a file's bytes ``start``..``stop`` from the store. Raises EndsEarly, or another OSError."""
        if start == stop:
            return b""
        path = self._at(name)
        data = bytes(self._try(f"read {name}", lambda: self._reader(name).cat_file(path, start=start, end=stop)))
        if len(data) != stop - start:
            raise EndsEarly(stop)
        return data

    def stream(self, name: str, start: int, stop: int) -> Iterator[bytes]:
        """Yield a file's bytes in order, with some requests ahead. Raises OSError."""
        with Threads(IN_FLIGHT) as pool:
            waiting: list[Future[bytes]] = []
            cuts = iter(range(start, stop, REQUEST_BYTES))
            try:
                while True:
                    for begin in cuts:
                        waiting.append(pool.submit(self.fetch, name, begin, min(begin + REQUEST_BYTES, stop)))
                        if len(waiting) == IN_FLIGHT:
                            break
                    if not waiting:
                        return
                    yield waiting.pop(0).result()
            finally:
                for one in waiting:
                    one.cancel()

    def _reader(self, name: str) -> Any:
        """Return the reader of ranges: obstore if it is installed and sees the listed object, else fsspec."""
        if self._fast is not None and not self._is_fast:
            try:
                seen = [one.info(self._at(name)) for one in (self._fast, self._fs)]
                first, second = (Object(int(info["size"]), _version(info)) for info in seen)
                is_same = first == second
                why = "it sees another object"
            except Exception as error:  # it takes its configuration from the environment only
                is_same, why = False, self._short(error)
            if not is_same:
                logger.info("%s: fsspec reads it, not obstore: %s", self.url, why)
                self._fast = None
            self._is_fast = is_same
        return self._fast if self._is_fast else self._fs

    def put(self, name: str, source: Path, crc: int, on_read: Callable[[int], None] = lambda num_bytes: None) -> None:
        """Upload a local file, and read it back. Raises OSError, StorageError.

        ``crc`` is its CRC-32; ``on_read`` is called with numbers of bytes.
        """
        self._try(f"write {name}", lambda: self._fs.put_file(str(source), self._at(name)))
        found = 0
        for data in self.stream(name, 0, source.stat().st_size):
            found = crc32(data, found)
            on_read(len(data))
        if found != crc:
            what = "the uploaded object does not read back correctly"
            fix = "check the store; the upload starts again with the next attempt, or if you rerun the same command"
            raise StorageError.at(f"{self.url}/{name}", what, fix)

    def put_bytes(self, name: str, data: bytes) -> None:
        """Write a small object. Raises OSError, StorageError."""
        self._try(f"write {name}", lambda: self._fs.pipe_file(self._at(name), data))

    def get_bytes(self, name: str, most: int) -> bytes:
        """Return the first ``most`` bytes of a small object as it is now. Raises OSError, StorageError."""
        return bytes(self._try(f"read {name}", lambda: self._fs.cat_file(self._at(name), start=0, end=most)))

    def names(self) -> set[str]:
        """Return the names of what is in the folder now. Raises OSError, StorageError."""
        self._fs.invalidate_cache()
        try:
            return {path.rpartition("/")[2] for path in self._try("list it", lambda: self._fs.ls(self._path, False))}
        except FileNotFoundError:
            return set()

    def exists(self, name: str) -> bool:
        """Return whether the store has a file now, without a listing. Raises OSError, StorageError."""
        return bool(self._try(f"look for {name}", lambda: self._fs.exists(self._at(name))))

    def make_folder(self, name: str) -> None:
        """Make a folder, in a store that has folders. Raises OSError, StorageError."""
        self._try(f"make {name}", lambda: self._fs.makedirs(self._at(name), exist_ok=True))

    def remove_folder(self, name: str) -> None:
        """Remove a folder with its content. Raises OSError, StorageError."""
        with suppress(FileNotFoundError):
            self._try(f"remove {name}", lambda: self._fs.rm(self._at(name), recursive=True))

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects, if they exist. Raises OSError, StorageError."""
        for name in names:
            with suppress(FileNotFoundError):
                self._try(f"remove {name}", partial(self._fs.rm_file, self._at(name)))

    def _try(self, what: str, call: Callable[[], T]) -> T:
        """Make a request, with retries after errors that may be temporary. Raises OSError, StorageError."""
        pause = FIRST_PAUSE_S
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return call()
            except FileNotFoundError as error:
                raise FileNotFoundError(errno.ENOENT, "the object is gone") from error
            except Exception as error:
                if isinstance(error, PermissionError) or "Credentials" in type(error).__name__:  # a retry is pointless
                    fix = "set or renew the credentials, and rerun the same command"
                    raise StorageError.at(self.url, f"can't {what}: {self._short(error)}", fix) from error
                if attempt == ATTEMPTS:
                    fix = "check the connection, and rerun the same command"
                    raise StorageError.at(self.url, f"can't {what}: {self._short(error)}", fix) from error
                logger.info("%s: %s; attempt %d of %d follows", self.url, self._short(error), attempt + 1, ATTEMPTS)
                time.sleep(pause)
                pause *= 2
        raise AssertionError

    def _short(self, error: BaseException) -> str:
        text = masked((str(error).splitlines() or [type(error).__name__])[0])
        if self.url != self.given:  # a store may show a part of what was masked
            words = re.split(r"[/:?&=@]", self.given)
            for word in (one for one in words if len(one) >= _SECRET and one not in self.url):
                text = text.replace(word, "***")
        return f"{type(error).__name__}: {text[:200]}"


class RemotePath(PosixPath):
    """A path in a folder of an object store; `open_location` makes a subclass for each folder.

    It is the path in the folder's cache, so any code that takes a path can list it and read sizes. Its bytes come from
    the store. Formatted as text (``f"{path}"``), it is the URL, without passwords.
    """

    remote: ClassVar[RemoteFolder]

    @property
    def key(self) -> str:
        """The name in `remote`; empty for the folder itself"""
        return "" if self == self.remote.root else os.path.relpath(self, self.remote.root)

    @property
    def is_inside(self) -> bool:
        """Whether it is the folder or in it"""
        return self.key != ".." and not self.key.startswith("../")

    def __format__(self, spec: str) -> str:
        is_url = self.is_absolute() and self.is_inside  # else it is on this machine, as the staging folder is
        return format(f"{self.remote.url}/{self.key}".rstrip("/") if is_url else str(self), spec)

    def __repr__(self) -> str:
        return f"RemotePath({f'{self}'!r})"

    def __reduce__(self) -> tuple[Any, ...]:  # another process opens the URL
        return open_location, (f"{self.remote.given}/{self.key}".rstrip("/"),)


def open_location(text: str) -> Path:
    """Return the path that a text or a URL names; the folder of a URL is listed.

    ``URL@TAG`` names a tag folder of DeepSpeed's, unless there is something of this name. Raises UsageError for a URL
    of an unknown kind, StorageError.
    """
    if not is_url(text):
        return Path(text.removeprefix("file://").removeprefix("local://"))
    found = _open(text.rstrip("/"))
    folder, _, tag = text.rstrip("/").rpartition("@")
    if folder and not folder.endswith("/") and tag and "/" not in tag and not found.exists():
        named = _open(folder) / tag
        return named if named.is_dir() else found
    return found


def as_remote(path: Path) -> RemotePath | None:
    """Return a path in the cache of an opened URL as a `RemotePath`, also if ``Path(path)`` has lost the type: as a
    local file it would read as zeros. None for any other path."""
    if isinstance(path, RemotePath):
        return path
    if _made is None or not path.is_relative_to(_made):
        return None
    return next((type(root)(path) for root in list(_opened.values()) if path.is_relative_to(root)), None)


def device_of(path: Path) -> int | None:
    """Return the file system that a path is on, or will be; None for an object store."""
    while not path.exists():
        path = path.parent
    return None if as_remote(path) is not None else path.stat().st_dev


_opening = threading.Lock()
_opened: dict[str, RemotePath] = {}
"""By URL: a folder that is opened again, or is in an opened one, has the same cache"""


def known_location(url: str) -> bool:
    """Return whether the folder of a URL, or one around it, was opened before."""
    return any(url.rstrip("/") == one or url.startswith(f"{one}/") for one in list(_opened))


def _open(url: str) -> Path:
    with _opening:
        for known, root in _opened.items():
            if url == known or url.startswith(f"{known}/"):
                return root / url[len(known) :].strip("/")
        path = _folder() / hashlib.sha256(url.encode()).hexdigest()[:16] / (url.rpartition("/")[2] or "root")
        path.parent.mkdir(exist_ok=True)  # a listing may have failed before
        remote = RemoteFolder(url, path)
        remote.list()
        _opened[url] = type("RemotePath", (RemotePath,), {"remote": remote})(path)
        return _opened[url]


def _folder() -> Path:
    """Return the folder of all caches of this process."""
    global _made
    if _made is None:
        _made = Path(tempfile.mkdtemp(prefix="llmtailor-remote-"))
        atexit.register(shutil.rmtree, _made, ignore_errors=True)
    return _made


_made: Path | None = None


def _file_system(url: str) -> tuple[Any, str]:
    if (scheme := url.partition("://")[0]) in ("http", "https"):
        what = f"{scheme}:// names a web server, whose listings state neither sizes nor versions of files"
        fix = "copy the files to this machine, and name the copy; or give the URL of an object store, such as s3://"
        raise UsageError.at(url, what, fix)
    try:
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]

        fs, path = url_to_fs(url)
    except (ImportError, ValueError) as error:
        fix = "pip install 'llmtailor[remote]' and the package of this kind of URL, such as s3fs"
        raise UsageError.at(masked(url), f"the URL can't be used: {masked(str(error))}", fix) from error
    return fs, str(path).rstrip("/")


def _obstore(url: str) -> Any:
    """Return obstore's file system for a URL; None if it is not installed, or does not know the kind of store."""
    kind = _OF_OBSTORE.get(url.partition("://")[0])
    try:
        from obstore.fsspec import FsspecStore  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        return None
    return FsspecStore(kind, client_options={"allow_http": True}) if kind else None


def _version(info: dict[str, Any]) -> str:
    for key in ("ETag", "etag", "e_tag", "blob_id", "generation", "LastModified", "last_modified", "mtime", "created"):
        if info.get(key):
            return str(info[key])
    return ""


def _is_safe(name: str) -> bool:
    return not name or (all(word not in ("", ".", "..") for word in name.split("/")) and "\0" not in name)
