"""Uploads a complete output to an object store.

A store has no rename that publishes a folder. So a marker is there first and removed last, after everything was read
back: a folder with the marker is no checkpoint for any command.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from llmtailor.engine.pool import Stop, run_all
from llmtailor.errors import StorageError, TargetError
from llmtailor.storage.checksums import crc32
from llmtailor.storage.listing import list_files
from llmtailor.storage.local import read_source
from llmtailor.storage.stand_in import STORE_WORKERS, UPLOADING, Remote, stand_in_of

_FILES = "files"
_MAX_MARKER_BYTES = 64 << 20


def is_unfinished(out: Path) -> bool:
    """Return whether a folder in a store is what an upload left that was cut off."""
    return stand_in_of(out) is not None and (out / UPLOADING).is_file()


def clear(out: Path) -> None:
    """Remove what such an upload left. Raises TargetError if anything else is there, StorageError, SourceError."""
    remote, inside = _of(out)
    try:
        marker = json.loads(read_source(out / UPLOADING, f"{remote.url}/{UPLOADING}", _MAX_MARKER_BYTES))
        begun = {UPLOADING, *map(str, marker[_FILES])}
    except (ValueError, TypeError, KeyError) as error:
        raise TargetError.at(out, f"{UPLOADING} in it is not llmtailor's", "choose another output") from error
    if others := sorted(list_files(out).keys() - begun):
        what = f"an upload into it was cut off, and since then it got other files: {', '.join(others[:3])}"
        raise TargetError.at(out, what, "choose another output")
    remote.remove(inside + name for name in sorted(list_files(out), key=lambda name: name == UPLOADING))
    remote.list()
    shutil.rmtree(out)  # the stand-in's folders


def upload(out: Path, crcs: Mapping[str, int], on_progress: Callable[[int], None], stop: Stop) -> None:
    """Upload the files of ``out``, the stand-in of a folder in a store, and read them back.

    Args:
        out: complete, with nothing in the store.
        crcs: the CRC-32 of each of its files.
        on_progress: called with numbers of bytes, from several threads.
        stop: checked between requests.

    Raises StorageError if the store refuses or returns something else, Interrupted on Ctrl-C.
    """
    remote, inside = _of(out)
    try:
        remote.put_bytes(inside + UPLOADING, json.dumps({_FILES: sorted(crcs)}).encode())
        jobs = [partial(_upload_file, remote, inside + name, crc, on_progress, stop) for name, crc in crcs.items()]
        run_all(jobs, STORE_WORKERS, stop)
        remote.remove([inside + UPLOADING])
    except OSError as error:
        what = f"can't upload: {error.strerror or error}"
        raise StorageError.at(remote.url, what, "check the store, and run the same command again") from error


def _of(out: Path) -> tuple[Remote, str]:
    found = stand_in_of(out)
    assert found is not None, "uploads go to stand-ins"
    return found[0], f"{found[1]}/" if found[1] else ""


def _upload_file(remote: Remote, name: str, crc: int, on_progress: Callable[[int], None], stop: Stop) -> None:
    stop.check()
    remote.put(name)
    found = 0
    for data in remote.stream(name, 0, (remote.root / name).stat().st_size):
        stop.check()
        found = crc32(data, found)
        on_progress(len(data))
    if found != crc:
        what = "what the store returns differs from what was uploaded"
        raise StorageError.at(f"{remote.url}/{name}", what, "run the same command again")
