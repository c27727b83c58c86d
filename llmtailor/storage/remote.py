"""Checkpoints in object stores: read by ranges, through a local stand-in, and uploaded.

A URL is opened as a local folder, its stand-in, whose files have the names and sizes of the store's objects but no
content. Whatever lists folders or asks for sizes works on it unchanged. `local.open_source` and `local.Files`, through
which all files are read, fetch the bytes: headers in blocks, which are kept in the stand-in, and tensors by exact
ranges, which are not. An output is made in its stand-in, and uploaded when it is complete.

fsspec (https://filesystem-spec.readthedocs.io) knows the stores: s3, gs, az, hf and more, each with a package of its
own. Ranges of s3, gs and az come through obstore if that is installed, which takes less CPU time.
"""

from __future__ import annotations

import atexit
import errno
import hashlib
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from llmtailor.errors import StorageError, UsageError
from llmtailor.storage.local import EndsEarly
from llmtailor.storage.stand_in import locate, stand_ins

logger = logging.getLogger(__name__)
T = TypeVar("T")

HEADER_BYTES = 256 << 10
"""Headers are fetched in blocks of this size."""
REQUEST_BYTES = 4 << 20
"""The most that one request asks for"""
IN_FLIGHT = 4
"""Requests at once for one output file; `STORE_WORKERS` files are written at once"""
ATTEMPTS = 5
FIRST_PAUSE_S = 0.5
"""Before the second attempt; each further pause is twice as long"""
_OF_OBSTORE = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "az": "az", "abfs": "az"}


def is_url(text: str | os.PathLike[str]) -> bool:
    """Return whether a location is a URL such as ``s3://bucket/run``."""
    scheme, separator, _ = str(text).partition("://")
    return bool(separator) and scheme.isidentifier() and scheme not in ("file", "local")


@dataclass(frozen=True, slots=True)
class Object:
    """An object of a store as listed."""

    num_bytes: int
    version: str
    """Its ETag or, if the store has none, its time of modification"""

    @property
    def mtime_ns(self) -> int:
        """The time of modification of its stand-in: any number that changes with the content"""
        digest = hashlib.sha256(self.version.encode()).digest()
        return int.from_bytes(digest[:4], "big") * 1_000_000_000


class RemoteFolder:
    """A folder of a store, and its stand-in. Implements `stand_in.Remote`."""

    def __init__(self, url: str, root: Path) -> None:
        self.url = url.rstrip("/")
        self.root = root
        self._fs, self._path = _file_system(self.url)
        self._ranges = _range_reader(self._fs, self.url)
        self._lock = threading.Lock()
        self._present: set[tuple[str, int]] = set()
        self._objects: dict[str, Object] = {}
        self._is_listed = False

    def list_once(self) -> None:
        """List the folder unless that was done. Raises as `list`."""
        if not self._is_listed:
            self.list()

    def list(self) -> None:
        """Make the stand-in's files those that are in the store now. Raises StorageError."""
        self._fs.invalidate_cache()
        try:
            found = self._try("list it", lambda: self._fs.find(self._path, detail=True))
        except FileNotFoundError:
            found = {}
        prefix = self._path.strip("/") + "/"
        objects = {
            name: Object(int(info["size"] or 0), _version(info))
            for full, info in found.items()
            if info["type"] == "file" and (name := full.strip("/").removeprefix(prefix)) and not name.startswith("/")
        }
        for name in self._objects.keys() - objects.keys():
            (self.root / name).unlink(missing_ok=True)
        for name, one in objects.items():
            if one != self._objects.get(name) and _is_safe(name):
                path = self.root / name
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("wb") as file:
                    file.truncate(one.num_bytes)
                os.utime(path, ns=(one.mtime_ns, one.mtime_ns))
                self._present = {(path, block) for path, block in self._present if path != name}
        self._objects, self._is_listed = objects, True

    def fill(self, name: str, start: int, stop: int) -> None:
        """Get a file's bytes into its stand-in, with those around them. Raises OSError, StorageError."""
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
        data = self._try(f"read {name}", lambda: self._ranges(f"{self._path}/{name}", start, stop))
        if len(data) != stop - start:
            raise EndsEarly(stop)
        return data

    def stream(self, name: str, start: int, stop: int) -> Iterator[bytes]:
        """Yield a file's bytes in order, with some requests ahead. Raises OSError."""
        with ThreadPoolExecutor(IN_FLIGHT) as pool:
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

    def put(self, name: str) -> None:
        """Upload the stand-in's file. Raises OSError, StorageError."""
        source = self.root / name
        self._try(f"write {name}", lambda: self._fs.put_file(str(source), f"{self._path}/{name}"))

    def put_bytes(self, name: str, data: bytes) -> None:
        """Write a small object. Raises OSError, StorageError."""
        self._try(f"write {name}", lambda: self._fs.pipe_file(f"{self._path}/{name}", data))

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects; those that are gone already don't matter. Raises OSError, StorageError."""
        for name in names:
            with suppress(FileNotFoundError):
                self._try(f"remove {name}", partial(self._fs.rm_file, f"{self._path}/{name}"))

    def _try(self, what: str, call: Callable[[], T]) -> T:
        """Make a request; repeat it if it fails in a way that may pass. Raises OSError, StorageError."""
        pause = FIRST_PAUSE_S
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return call()
            except FileNotFoundError as error:
                raise FileNotFoundError(errno.ENOENT, "the object is gone") from error
            except PermissionError as error:
                fix = "renew the credentials, and run the same command again"
                raise StorageError.at(self.url, f"can't {what}: {_short(error)}", fix) from error
            except Exception as error:
                if attempt == ATTEMPTS:
                    fix = "check the connection, and run the same command again"
                    raise StorageError.at(self.url, f"can't {what}: {_short(error)}", fix) from error
                logger.info("%s: %s; attempt %d of %d follows", self.url, _short(error), attempt + 1, ATTEMPTS)
                time.sleep(pause)
                pause *= 2
        raise AssertionError


def open_location(text: str) -> Path:
    """Return the folder that a path or a URL names; of a URL, its stand-in, which is listed when it is first read.

    Raises UsageError for a URL of an unknown kind.
    """
    if not is_url(text):
        return Path(text.removeprefix("file://"))
    url = text.rstrip("/")
    if (known := locate(url)) != Path(url):
        return known
    name = url.rpartition("/")[2] or "root"
    root = _folder() / hashlib.sha256(url.encode()).hexdigest()[:16] / name
    root.parent.mkdir()
    stand_ins[root] = RemoteFolder(url, root)
    return root


def _folder() -> Path:
    """Return the folder of all stand-ins of this process."""
    global _made
    if _made is None:
        _made = Path(tempfile.mkdtemp(prefix="llmtailor-remote-"))
        atexit.register(shutil.rmtree, _made, ignore_errors=True)
    return _made


_made: Path | None = None


def _file_system(url: str) -> tuple[Any, str]:
    try:
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]

        fs, path = url_to_fs(url)
    except (ImportError, ValueError) as error:
        fix = "pip install 'llmtailor[remote]' and the package of this kind of URL, such as s3fs"
        raise UsageError.at(url, f"the URL can't be used: {error}", fix) from error
    return fs, str(path).rstrip("/")


def _range_reader(fs: Any, url: str) -> Callable[[str, int, int], bytes]:
    """Return a function that reads bytes of an object: obstore's if that is installed, else fsspec's."""

    def read(path: str, start: int, stop: int) -> bytes:
        return bytes(fs.cat_file(path, start=start, end=stop))

    scheme = url.partition("://")[0]
    try:
        from obstore.fsspec import FsspecStore  # type: ignore[import-not-found, unused-ignore]

        fast = FsspecStore(_OF_OBSTORE[scheme], client_options={"allow_http": True})
    except Exception as error:  # not installed, another kind of store, or no configuration in the environment
        logger.debug("%s: ranges are read with fsspec (%s)", url, _short(error))
        return read
    failed: list[bool] = []

    def read_fast(path: str, start: int, stop: int) -> bytes:
        if not failed:
            try:
                return bytes(fast.cat_file(path, start=start, end=stop))
            except Exception as error:
                logger.info("%s: obstore can't read it (%s); fsspec does from now on", url, _short(error))
                failed.append(True)
        return read(path, start, stop)

    return read_fast


def _version(info: dict[str, Any]) -> str:
    for key in ("ETag", "etag", "e_tag", "blob_id", "generation", "LastModified", "last_modified", "mtime", "created"):
        if info.get(key):
            return str(info[key])
    return ""


def _is_safe(name: str) -> bool:
    return all(word not in ("", ".", "..") for word in name.split("/")) and "\0" not in name


def _short(error: BaseException) -> str:
    lines = str(error).splitlines() or [type(error).__name__]
    return f"{type(error).__name__}: {lines[0][:200]}"
