"""Local files and folders: writes survive a power cut, reads never hang, one writer holds a folder at a time.

Renames neither overwrite nor leave a gap, by flags of Linux's renameat2 that the standard library lacks; file systems
without them (NFS, some FUSE ones) and other systems use the closest that POSIX offers.

Source files must be regular ones: a pipe would block forever, and opening some devices has side effects. Symbolic
links are followed, whatever they point to: copying only reads what the user may read anyway. What is written,
renamed or removed is never behind a link: names that llmtailor chooses itself must be free, or its own (`check_own`).

The lock is taken on a file opened for writing, because NFS refuses to lock a folder. On file systems without locks
(Lustre as it is often mounted, NFS without its lock service), an exclusively created file replaces it if the caller
names one. There, a holder on another node can't be checked, so it is never assumed dead.

Linux reads only 128 KiB ahead, so a reader that also computes checksums and writes would often wait for the disk
(`Ahead`). An opened URL is a `RemotePath`: the bytes of its files are in an object store (see `storage.remote`).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import socket
import stat
import struct
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import lru_cache, partial
from pathlib import Path

from llmtailor.codes import Code
from llmtailor.errors import SourceError, StorageError, TargetError, damaged
from llmtailor.storage.checksums import crc32
from llmtailor.storage.remote import EndsEarly, RemotePath, as_remote, known_location, open_location


@dataclass(frozen=True, slots=True)
class FileFact:
    """A file as indexed; a later change means that the source changed during the run."""

    num_bytes: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    """These two also change with a new hard link or mount, so the contents are compared before a file is refused"""

    @classmethod
    def of(cls, stat: os.stat_result) -> FileFact:
        return cls(stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)

    def is_like(self, other: FileFact) -> bool:
        """Return whether size and modification time agree."""
        return (self.num_bytes, self.mtime_ns) == (other.num_bytes, other.mtime_ns)


Entries = Mapping[str, FileFact | None]
"""Relative path -> size and time of a regular file, None for anything else. Folders' paths end in ``/``."""


def list_entries(folder: Path) -> dict[str, FileFact | None]:
    """Return the direct entries of a folder, sorted by name; links are not followed. Raises OSError."""
    found: dict[str, FileFact | None] = {}
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda one: one.name):
            status = entry.stat(follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):
                found[f"{entry.name}/"] = None
            else:
                found[entry.name] = FileFact.of(status) if stat.S_ISREG(status.st_mode) else None
    return found


def added_since(folder: Path, before: Entries) -> list[str]:
    """Return the entries of a folder, at any depth, that are new or changed since ``before``. Raises OSError.

    A new folder is listed without its content.
    """
    found: list[str] = []
    for name, fact in list_entries(folder).items():
        known = before.get(name)
        if name not in before or not (fact.is_like(known) if fact and known else fact is known):
            found.append(name)
        elif name.endswith("/"):
            inside = {path[len(name) :]: old for path, old in before.items() if path.startswith(name) and path != name}
            found += [name + path for path in added_since(folder / name, inside)]
    return found


def facts_now(root: Path, paths: Iterable[str]) -> dict[str, FileFact | None]:
    """Return the files as they are now; None for one that is gone or can't be read."""
    found: dict[str, FileFact | None] = {}
    for path in paths:
        try:
            found[path] = FileFact.of((root / path).stat())
        except OSError:
            found[path] = None
    return found


def list_files(folder: Path) -> dict[str, tuple[int, int]]:
    """Return size and modification time of every file at any depth, without following links, by relative path."""
    found = {}
    for where, _, names in os.walk(folder):
        for name in names:
            path = Path(where) / name
            status = path.lstat()
            found[str(path.relative_to(folder))] = (status.st_size, status.st_mtime_ns)
    return found


AHEAD_BYTES = 32 << 20
_MIN_BYTES = 128 << 10


class Ahead:
    """Reads ahead in bytes ``start``..``stop`` of an open file, to the end without ``stop``."""

    def __init__(self, fd: int, start: int, stop: int | None = None) -> None:
        self._fd, self._asked = fd, start
        self._stop = sys.maxsize if stop is None else stop
        self._wanted = start if self._stop - start > _MIN_BYTES else self._stop

    def reached(self, at: int) -> None:
        """Note that the bytes before ``at`` have been read; call it before each read."""
        if at >= self._wanted and self._asked < self._stop:
            count = min(AHEAD_BYTES, self._stop - self._asked)
            with suppress(OSError):  # it is only a hint
                os.posix_fadvise(self._fd, self._asked, count, os.POSIX_FADV_WILLNEED)
            self._asked += count
            self._wanted = self._asked - AHEAD_BYTES // 2


def _stored(path: Path) -> RemotePath | None:
    """Return a path whose bytes are in a store, else None: an unfinished output is on this machine only."""
    remote = as_remote(path)
    return remote if remote is not None and remote.remote.holds(remote.key) else None


def as_path(given: str | os.PathLike[str]) -> Path:
    """Return the path that a caller of the public API gives: a path, its text, or a URL, which is listed again."""
    if isinstance(given, Path):
        return given
    is_known = known_location(os.fspath(given))
    path = open_location(os.fspath(given))
    if is_known and isinstance(path, RemotePath):
        path.remote.list()
    return path


def absolute(path: Path) -> Path:
    """Return the path from the root, without ``..``; links are not followed."""
    return path if isinstance(path, RemotePath) else Path(os.path.abspath(path))


def with_tag(path: Path) -> Path:
    """Return the tag folder that ``DIR@TAG`` names; any other path as it is."""
    folder, _, tag = path.name.rpartition("@")
    if not folder or not tag or path.exists():
        return path
    named = path.parent / folder / tag
    return named if named.is_dir() else path


UNFINISHED = re.compile(r"\..+\.llmtailor-new")
"""Names of files that `replace_durably` was writing when it was killed"""


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Write all of the data, in as many calls as needed. Raises OSError."""
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]


def bypass_cache(fd: int, on: bool = True) -> bool:
    """Turn direct writes (O_DIRECT, `man 2 open`) on or off; return whether they are now on.

    They need memory, offsets and lengths that are multiples of a block. They are used where the file system is on one
    block device (ext4, XFS): over a network, each would wait for an answer.
    """
    flag, device = getattr(os, "O_DIRECT", 0), os.fstat(fd).st_dev
    if not flag or (on and not Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").exists()):
        return False
    try:
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | flag if on else flags & ~flag)
    except OSError:
        return False
    return on


@contextmanager
def disk_errors(where: object, what: str, fix: str = "check the disk") -> Iterator[None]:
    """Turn an OSError into a StorageError: ``what``, with the system's reason."""
    try:
        yield
    except OSError as error:
        raise StorageError.at(where, f"{what}: {error.strerror or error}", fix) from error


def write_durably(path: Path, data: bytes) -> None:
    """Write a new file and fsync it. Raises StorageError."""
    with disk_errors(path, "can't write"):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            write_all(fd, data)
            os.fsync(fd)
        finally:
            os.close(fd)


def replace_durably(path: Path, data: bytes) -> None:
    """Write a file atomically: it is either the old one, if any, or the whole new one. Raises StorageError."""
    new = path.with_name(f".{path.name}.llmtailor-new")
    with disk_errors(path, "can't write"):
        new.unlink(missing_ok=True)
        write_durably(new, data)
        new.replace(path)


def check_own(path: Path, *, is_file: bool = False) -> None:
    """Raise TargetError if a link, or anything else that llmtailor never makes, has the name of its folder or file.

    Call it before writing or removing there. A missing one is fine. Raises OSError.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not (stat.S_ISREG(mode) if is_file else stat.S_ISDIR(mode)):
        what = f"llmtailor needs this name for a {'file' if is_file else 'folder'} of its own, but it is {_kind(mode)}"
        raise TargetError.at(path, what, "move it elsewhere, then rerun the command")


def append_line(path: Path, line: bytes) -> None:
    """Append a line to a file of llmtailor's, and end a line that a kill has cut. Raises TargetError, OSError."""
    check_own(path, is_file=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    try:
        end = os.lseek(fd, 0, os.SEEK_END)
        write_all(fd, (b"" if end == 0 or os.pread(fd, 1, end - 1) == b"\n" else b"\n") + line + b"\n")
    finally:
        os.close(fd)


def make_folder(path: Path) -> None:
    """Durably create a folder and its missing parents; it may already exist. Raises OSError."""
    missing = []
    while not path.exists():
        missing.append(path)
        path = path.parent
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
        fsync_folder(folder.parent)


_NO_LINKS = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS, errno.EACCES)


def try_link(source: Path, target: Path) -> bool:
    """Make ``target`` a hard link to a file; return False where that is not possible. Raises OSError."""
    try:
        os.link(os.path.realpath(source), target)  # else Linux would link a symbolic link itself
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return False
    return True


def fsync_file(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def fsync_folder(folder: Path) -> None:
    """Make the names in a folder durable, if the file system can. Raises OSError."""
    try:
        fsync_file(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems have no fsync for folders
            raise


_AT_FDCWD = -100
_NOREPLACE = 1
_EXCHANGE = 2


def rename_new(source: Path, target: Path) -> None:
    """Rename to an unused name; even an empty folder counts as used. Raises FileExistsError, or OSError."""
    if _renameat2(source, target, _NOREPLACE):
        return
    if target.exists():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
    source.rename(target)


def replace_folder(source: Path, target: Path, aside: Path) -> None:
    """Replace the folder ``target``, which is then at ``source``, or else at ``aside``. Raises OSError.

    Without renameat2, nothing is at ``target`` for a moment, and the old folder stays at ``aside``.
    """
    if not _renameat2(source, target, _EXCHANGE):
        target.rename(aside)
        try:
            source.rename(target)
        except OSError:
            aside.rename(target)
            raise


def _renameat2(source: Path, target: Path, flag: int) -> bool:
    """Rename with a flag; return False if the system can't."""
    try:
        function = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):  # no such C library, or no such function in it
        return False
    if function(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flag) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(target))


def read_into(fd: int, offset: int, room: memoryview) -> None:
    """Fill ``room`` with the bytes of an open file from ``offset`` on. Raises EndsEarly, or another OSError."""
    while room:
        count = os.preadv(fd, [room], offset)
        if count == 0:
            raise EndsEarly(offset + len(room))
        offset, room = offset + count, room[count:]


_FICLONERANGE = 0x4020940D


def clone_range(source: int, start: int, num_bytes: int, target: int, at: int) -> None:
    """Let ``num_bytes`` of an open file, from byte ``at`` on, share the blocks of another one from ``start`` on.

    A later write to one of them does not change the other. All numbers are multiples of the block size. Raises OSError
    if the file system can't.
    """
    fcntl.ioctl(target, _FICLONERANGE, struct.pack("qQQQ", source, start, num_bytes, at))


def chunks(fd: int, buffer: memoryview, start: int = 0, stop: int | None = None) -> Iterator[memoryview]:
    """Yield the bytes of an open file from ``start`` on, in ``buffer``, which is reused for each chunk.

    Raises EndsEarly if there are none left before ``stop``, or another OSError.
    """
    ahead = Ahead(fd, start, stop)
    while stop is None or start < stop:
        ahead.reached(start)
        room = buffer if stop is None else buffer[: stop - start]
        count = os.preadv(fd, [room], start)
        if count:
            yield room[:count]
        elif stop is None:
            return
        else:
            raise EndsEarly(stop)
        start += count


class Changed(OSError):
    """A file has changed since it was indexed."""


class OpenFile:
    """An open regular file, closed when its last user drops it: another thread may still be reading.

    Raises Changed if it is not as indexed (``fact``), or another OSError.
    """

    fd = -1

    def __init__(self, path: Path, fact: FileFact | None = None):
        self.stored = _stored(path)
        """Set if the bytes are in an object store"""
        self.fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        status = os.fstat(self.fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, f"it is {_kind(status.st_mode)}")
        self.num_bytes = status.st_size
        self.device = status.st_dev
        if fact is not None and not fact.is_like(FileFact.of(status)):
            raise Changed(errno.ESTALE, "it changed while it was read")

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)

    def read_into(self, offset: int, room: memoryview) -> None:
        """Fill ``room`` from ``offset`` on. Raises EndsEarly, or another OSError."""
        if self.stored is None:
            read_into(self.fd, offset, room)
        else:
            room[:] = self.stored.remote.fetch(self.stored.key, offset, offset + len(room))

    def stream(self, start: int, stop: int, chunk_bytes: int = 0) -> Iterator[memoryview]:
        """Yield the bytes in order; a local file's in one reused buffer. Raises EndsEarly, or another OSError."""
        if self.stored is None:
            yield from chunks(self.fd, memoryview(bytearray(min(chunk_bytes, stop - start))), start, stop)
        else:
            for data in self.stored.remote.stream(self.stored.key, start, stop):
                yield memoryview(data)


class OpenFiles:
    """Files below a folder, for random reads by any thread; those not in use are closed.

    ``facts`` describe the files as indexed; other files are not checked.
    """

    MAX_OPEN = 128

    def __init__(self, root: Path, facts: Mapping[str, FileFact] | None = None):
        self.root = root
        self.open = lru_cache(self.MAX_OPEN)(lambda path: OpenFile(root / path, (facts or {}).get(path)))
        """Returns an open file. Raises Changed, or another OSError."""

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.open.cache_clear()

    def read_into(self, path: str, offset: int, room: memoryview) -> None:
        """Fill ``room`` from ``offset`` on. Raises Changed, EndsEarly, or another OSError."""
        self.open(path).read_into(offset, room)

    def crc_of(
        self,
        path: str,
        start: int,
        stop: int,
        on_progress: Callable[[int], None] = lambda num_bytes: None,
        crc: int = 0,
    ) -> int:
        """Return the CRC-32 of bytes of a file, continuing from ``crc``. Raises as `read_into`."""
        buffer = memoryview(bytearray(min(stop - start, 1 << 20)))
        while start < stop:
            room = buffer[: stop - start]
            self.read_into(path, start, room)
            crc = crc32(room, crc)
            on_progress(len(room))
            start += len(room)
        return crc

    def will_need(self, path: str, start: int, stop: int) -> None:
        """Have the system fetch bytes ahead, if it can."""
        if (file := self.open(path)).stored is None:
            os.posix_fadvise(file.fd, start, stop - start, os.POSIX_FADV_WILLNEED)

    def forget(self, path: str) -> None:
        """Make the next read come from the disk, not from the page cache."""
        os.posix_fadvise(self.open(path).fd, 0, 0, os.POSIX_FADV_DONTNEED)


_KINDS = {
    stat.S_IFREG: "a file",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class SourceFile:
    """An open regular file, and its size at the moment of opening."""

    def __init__(self, fd: int, num_bytes: int, where: str, fill: Callable[[int, int], None] | None = None):
        self.fd = fd
        self.num_bytes = num_bytes
        self.where = where
        self.fill = fill
        """Called before bytes are read that may not be there yet"""

    def read(self, start: int, stop: int) -> bytes:
        """Return bytes ``start``..``stop``, which must be within ``num_bytes``.

        Raises SourceError if they can't be read or no longer exist.
        """
        chunks = []
        if self.fill is not None and start < stop:
            try:
                self.fill(start, stop)
            except OSError as error:
                raise _unreadable(self.where, error) from error
        while start < stop:
            try:
                chunk = os.pread(self.fd, stop - start, start)
            except OSError as error:
                raise _unreadable(self.where, error) from error
            if not chunk:
                what = f"the file ends before byte {stop}: it became shorter while it was read"
                raise SourceError.at(
                    self.where, what, "stop what writes to it, and rerun the command", Code.FILE_CHANGED
                )
            chunks.append(chunk)
            start += len(chunk)
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)


@contextmanager
def open_source(path: Path, where: str) -> Iterator[SourceFile]:
    """Open a regular file for reading; ``where`` is its name in messages. Raises SourceError for anything else."""
    try:
        check_regular(path.stat().st_mode, where)
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise damaged(where, "the file is missing", Code.FILE_MISSING) from error
    except ValueError as error:
        raise damaged(where, f"the file name is invalid ({error})", Code.FILE_UNREADABLE) from error
    except OSError as error:
        raise _unreadable(where, error) from error
    try:
        status = os.fstat(fd)
        check_regular(status.st_mode, where)
        stored = _stored(path)
        yield SourceFile(fd, status.st_size, where, partial(stored.remote.fill, stored.key) if stored else None)
    finally:
        os.close(fd)


def read_source(path: Path, where: str, max_bytes: int) -> bytes:
    """Return the content of a regular file of up to ``max_bytes``. Raises SourceError for anything else."""
    with open_source(path, where) as file:
        check_size(file, max_bytes)
        return file.read(0, file.num_bytes)


def check_size(file: SourceFile, max_bytes: int) -> None:
    """Raise SourceError for a file of more than ``max_bytes``."""
    if file.num_bytes > max_bytes:
        what = f"the file has {file.num_bytes:,} bytes, but should never need more than {max_bytes:,}"
        raise damaged(file.where, what)


def check_regular(mode: int, where: str) -> None:
    """Raise SourceError, with the kind of file, unless the mode is that of a regular file."""
    if not stat.S_ISREG(mode):
        raise damaged(where, f"expected a file, but this is {_kind(mode)}", Code.NOT_A_FILE)


def _kind(mode: int) -> str:
    return _KINDS.get(stat.S_IFMT(mode), "not a regular file")


def _unreadable(where: str, error: OSError) -> SourceError:
    fix = "run as a user who may read it" if isinstance(error, PermissionError) else "check the disk"
    return SourceError.at(where, f"the file can't be read: {error.strerror or error}", fix, Code.FILE_UNREADABLE)


_WITHOUT_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL}


class LockHeld(Exception):
    """Another process has the lock; the argument describes it, if known."""


class Lock:
    """A lock on a file, held by this process, not by its forked children (data loader workers)."""

    def __init__(self, path: Path, owner: Path | None = None):
        """``owner`` is a file to create where there are no locks; without it, other processes are not kept out."""
        self.path = path
        self.owner = owner
        self.fd = -1
        """The locked file, open for reading and writing; -1 if the lock is not held"""
        self._times = 0
        self._owns_file = False

    def acquire(self, *, create: bool = True) -> None:
        """Take the lock, or increment its count if held; ``create`` makes the file if it is missing.

        Raises LockHeld, TargetError for something else of that name, FileNotFoundError (also if the file was removed in
        the meantime), or another OSError.
        """
        if self.fd >= 0:
            self._times += 1
            return
        check_own(self.path, is_file=True)
        fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0), 0o666)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise LockHeld("") from None
            except OSError as error:
                if error.errno not in _WITHOUT_LOCKS:
                    raise
                self._own()
            if not os.path.samestat(os.fstat(fd), self.path.stat()):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.path))
        except BaseException:
            os.close(fd)
            self._disown()
            raise
        self.fd, self._times = fd, 1
        _held.add(self)

    def release(self) -> None:
        """Undo one `acquire`; the last one releases the lock."""
        self._times = max(0, self._times - 1)
        if self.fd >= 0 and not self._times:
            self._disown()
            os.close(self.fd)
            self.fd = -1

    def _own(self) -> None:
        if self.owner is None:
            return
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        try:
            fd = os.open(self.owner, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            raise LockHeld(_read(self.owner)) from None
        self._owns_file = True
        try:
            write_all(fd, f"process {os.getpid()} on {socket.gethostname()}, since {now}".encode())
        finally:
            os.close(fd)

    def _disown(self) -> None:
        if self._owns_file and self.owner is not None:
            with suppress(OSError):
                self.owner.unlink()
        self._owns_file = False


_held: weakref.WeakSet[Lock] = weakref.WeakSet()


def _forget() -> None:
    """Close the copies in a forked child, because an open one holds the lock."""
    for lock in list(_held):
        if lock.fd >= 0:
            os.close(lock.fd)
        lock.fd, lock._times, lock._owns_file = -1, 0, False


os.register_at_fork(after_in_child=_forget)


def _read(owner: Path) -> str:
    with suppress(OSError):
        file = OpenFile(owner)  # open as long as it has a name
        return os.pread(file.fd, 200, 0).decode(errors="replace") or "an unknown process"
    return "an unknown process"
