"""fsspec's file system in memory, whose requests can be made to fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

Fault = Callable[[str, str, Any], Any]
"""Gets the request's kind, the path and the result; returns the result, or another, or raises"""


class FaultyFileSystem(MemoryFileSystem):
    """`fault` sees every request for a range and every upload."""

    protocol = "faulty"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    fault: ClassVar[Fault | None] = None
    requests: ClassVar[list[tuple[str, str, int]]] = []

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(str(path).replace("faulty://", "/"))

    def cat_file(self, path, start=None, end=None, **kwargs):
        data = super().cat_file(path, start=start, end=end, **kwargs)
        type(self).requests.append(("get", path, len(data)))
        return type(self).fault("get", path, data) if type(self).fault else data

    def put_file(self, lpath, rpath, *args, **kwargs):
        type(self).requests.append(("put", rpath, 0))
        if type(self).fault:
            type(self).fault("put", rpath, None)
        return super().put_file(lpath, rpath, *args, **kwargs)


fsspec.register_implementation("faulty", FaultyFileSystem, clobber=True)


@contextmanager
def failing(fault: Fault) -> Iterator[None]:
    FaultyFileSystem.fault = staticmethod(fault)
    try:
        yield
    finally:
        FaultyFileSystem.fault = None
