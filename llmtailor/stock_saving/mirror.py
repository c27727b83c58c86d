"""Copies finished stock checkpoints to an object store, in the background: the second level of `stock_saving.saver`.

A thread of rank 0 uploads the files of one checkpoint after the other, oldest first. As in an upload of `merge`, a
marker is written first and removed last, so no command takes an incomplete copy for a checkpoint. What training deletes
meanwhile is not copied; nothing is deleted in the store.
"""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path

from llmtailor.background.retrying import RetryingQueue
from llmtailor.frameworks.files import LATEST, tag_in
from llmtailor.runs.folder import files_in
from llmtailor.storage.local import OpenFiles
from llmtailor.storage.remote import UPLOADING, RemoteFolder

logger = logging.getLogger("llmtailor.saving")


class StockMirror:
    """Uploads checkpoints to ``URL/NAME``, each with the name of its folder. Raises UsageError for an unknown URL."""

    def __init__(self, url: str) -> None:
        self._remote = RemoteFolder(url.rstrip("/"), Path())
        self._queue = RetryingQueue("llmtailor-mirror", self._copy_unless_removed, str)
        self._queue.start()
        self.add = self._queue.add
        """Copies a checkpoint, after those before it"""

    def close(self, timeout: float) -> None:
        """Finish copying; give up after this number of seconds without progress, and say what is left."""
        if left := self._queue.close(timeout):
            logger.warning("not copied to %s: %s", self._remote.url, ", ".join(map(str, left)))

    def _copy_unless_removed(self, folder: Path) -> None:
        try:
            self._copy(folder)
            logger.info("copied %s to %s", folder, self._remote.url)
        except Exception:
            if folder.exists():
                raise
            logger.warning("%s was not copied to %s: it was removed", folder, self._remote.url)

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
            with OpenFiles(path.parent) as files:
                crc = files.crc_of(path.name, 0, path.stat().st_size)
            self._remote.put(name, path, crc)
            self._queue.progress = time.monotonic()
        self._remote.remove([marker])
        if tag_in(folder.parent / LATEST) == folder.name:  # of a DeepSpeed engine
            self._remote.put_bytes(LATEST, folder.name.encode())
