"""Copies finished stock checkpoints to an object store, in the background: the second level of `saving.stock`.

A thread of rank 0 uploads the files of one checkpoint after the other, oldest first. As in an upload of `merge`, a
marker is written first and removed last, so no command takes an incomplete copy for a checkpoint. If the store can't be
reached, the upload is retried with growing pauses. What training deletes meanwhile is not copied; nothing is deleted in
the store.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from pathlib import Path

from llmtailor.errors import TailorError
from llmtailor.loaders.files import LATEST
from llmtailor.runs.folder import files_in
from llmtailor.storage.checksums import crc32
from llmtailor.storage.remote import UPLOADING, RemoteFolder

logger = logging.getLogger("llmtailor.saving")
_PAUSE_S = (1.0, 60.0)
"""Seconds between two attempts: first and longest"""
_WAKE_UP_S = 0.2
_CHUNK_BYTES = 1 << 20


class StockMirror:
    """Uploads checkpoints to ``URL/NAME``, each with the name of its folder. Raises UsageError for an unknown URL."""

    def __init__(self, url: str) -> None:
        self._remote = RemoteFolder(url.rstrip("/"), Path())
        self._queue: deque[Path] = deque()
        self._progress = time.monotonic()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="llmtailor-mirror", daemon=True)
        self._thread.start()

    def add(self, folder: Path) -> None:
        """Copy a checkpoint, after those before it."""
        self._progress = time.monotonic()
        self._queue.append(folder)

    def close(self, timeout: float) -> None:
        """Finish copying; give up after this number of seconds without progress, and say what is left."""
        while self._queue and time.monotonic() - self._progress < timeout:
            time.sleep(_WAKE_UP_S)
        self._closing.set()
        if left := [str(folder) for folder in self._queue]:
            logger.warning("not copied to %s: %s", self._remote.url, ", ".join(left))

    def _run(self) -> None:
        while not self._closing.is_set():
            if not self._queue:
                self._closing.wait(_WAKE_UP_S)
                continue
            self._copy_until_done(self._queue[0])
            if not self._closing.is_set():
                self._queue.popleft()
                self._progress = time.monotonic()

    def _copy_until_done(self, folder: Path) -> None:
        pause, longest = _PAUSE_S
        has_failed = False
        while not self._closing.is_set():
            try:
                self._copy(folder)
                logger.info("copied %s to %s", folder, self._remote.url)
                return
            except Exception as error:
                if not folder.exists():
                    logger.warning("%s was not copied to %s: it was removed", folder, self._remote.url)
                    return
                if not has_failed:
                    why = error if isinstance(error, (TailorError, OSError)) else repr(error)
                    logger.warning("copying %s failed, retrying: %s", folder, why)
                has_failed = True
                self._closing.wait(pause)
                pause = min(2 * pause, longest)

    def _copy(self, folder: Path) -> None:
        paths = sorted(files_in(folder))
        if not paths:
            raise FileNotFoundError(folder)
        names = {f"{folder.name}/{path.relative_to(folder).as_posix()}": path for path in paths}
        self._remote.make_folder(folder.name)
        marker = f"{folder.name}/{UPLOADING}"
        self._remote.put_bytes(marker, json.dumps({"files": [one.partition("/")[2] for one in names]}).encode())
        for name, path in names.items():
            if "/" in name.partition("/")[2]:
                self._remote.make_folder(name.rpartition("/")[0])
            self._remote.put(name, path, _crc_of(path))
            self._progress = time.monotonic()
        self._remote.remove([marker])
        latest = folder.parent / LATEST  # of a DeepSpeed engine
        if latest.is_file() and latest.read_text() == folder.name:
            self._remote.put_bytes(LATEST, folder.name.encode())


def _crc_of(path: Path) -> int:
    found = 0
    with path.open("rb") as file:
        while data := file.read(_CHUNK_BYTES):
            found = crc32(data, found)
    return found
