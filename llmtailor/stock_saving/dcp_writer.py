"""torch.distributed.checkpoint's writer of files, whose ``.distcp`` files are written by a saver (torch 2.13).

Planning, and ``.metadata``, are torch's own: where each tensor is in its file is known before it is written.
"""

from __future__ import annotations

import queue
from pathlib import Path
from typing import Any, Protocol

from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from llmtailor.background.packing import LiveTensors
from llmtailor.checkpoint.layout import Bytes, FileLayout, Segment
from llmtailor.live.tensors import local_of
from llmtailor.stock_saving.torch_save import Stepped, lay_out_saved_blob


class FileSink(Protocol):
    """What takes files over: `stock.StockSaver`."""

    def add_file(self, path: str | Path, lay_out: Any) -> bool: ...


class LazyWriter(FileSystemWriter):
    """Hands its files to ``saver`` if they are in the open save; other files are written at once."""

    def __init__(self, saver: FileSink, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._saver = saver

    def _write_data(self, planner: Any, file_queue: queue.Queue[Any]) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        others: queue.Queue[Any] = queue.Queue()
        while not file_queue.empty():
            path, name, items = file_queue.get_nowait()

            def lay_out(
                path: str, live: LiveTensors, stepped: Stepped, name: str = name, items: Any = items
            ) -> FileLayout:
                pieces: list[Segment] = []
                at = 0
                for item in items:
                    data = planner.resolve_data(item)
                    if item.type == WriteItemType.BYTE_IO:
                        new: list[Segment] = [Bytes(data.getvalue(), "an object")]
                    else:
                        new = lay_out_saved_blob(local_of(data), at, live, stepped)
                    length = sum(piece.num_bytes for piece in new)
                    results.append(WriteResult(item.index, length, _StorageInfo(name, at, length)))
                    pieces += new
                    at += length
                return FileLayout(path, tuple(pieces))

            if not self._saver.add_file(path, lay_out):
                others.put((path, name, items))
        if not others.empty():
            return super()._write_data(planner, others)
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done
