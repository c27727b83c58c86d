"""A bar that counts bytes, on stderr, silent when that is no terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(total_bytes: int | None, *, quiet: bool, label: str = "writing") -> Iterator[Callable[[int], None]]:
    """Yield a function to be told how many bytes are done, from any thread; ``total_bytes`` is None if not known."""
    if quiet or not sys.stderr.isatty():
        yield lambda num_bytes: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(label, *columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=total_bytes)
        yield lambda num_bytes: progress.advance(task, num_bytes)
