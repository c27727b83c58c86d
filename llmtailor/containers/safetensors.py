"""safetensors: 8 bytes of little-endian header length, a JSON header, then the tensors.

``data_offsets`` count from the end of the header; the tensors tile the data section exactly. Large models are
split over several files; ``model.safetensors.index.json`` says which tensor is in which.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmtailor.checkpoint.index import TensorEntry
from llmtailor.checkpoint.layout import BLOCK_BYTES, Bytes, FileLayout, Fill, Segment, Slot, fill_all, shareable_start
from llmtailor.checkpoint.placement import Contiguous, Extent
from llmtailor.codes import Code
from llmtailor.containers.json import check_name, is_count, read_json, read_strict_json
from llmtailor.containers.unpickle import MAX_DIMENSIONS
from llmtailor.errors import PathIn, Problems, SourceError, attempt, damaged
from llmtailor.model.dtypes import DTYPES, ITEMSIZE
from llmtailor.model.roles import WEIGHT, State
from llmtailor.storage.local import open_source

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 32 << 20
"""The library's own limit is 100 MB. A tensor takes about 100 bytes, and Python's objects up to 20 times the header."""


@dataclass(frozen=True, slots=True)
class WeightFile:
    """One safetensors file: its tensors in the order of their data, and the header's metadata."""

    path: str
    tensors: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]
    filled_by: Mapping[str, tuple[State, int]] = field(default_factory=dict)
    """In a file to be written: the tensors that are not the weight of the same name, each with the state it is made
    from and the first element of that state"""


def read_weights(root: Path, where: str) -> tuple[WeightFile, ...]:
    """Return the headers of a checkpoint's weight files; empty if it has none.

    Raises SourceError with every missing, truncated or malformed file.
    """
    problems = Problems()
    files = survey_weights(root, where, problems)
    problems.raise_if_any()
    return files


def survey_weights(root: Path, where: str, problems: Problems) -> tuple[WeightFile, ...]:
    """Return the headers of the intact weight files; add the problems of the others to ``problems``."""
    is_single = (root / SINGLE).exists()  # transformers ignores an index beside it
    names_of: dict[str, set[str]] = {SINGLE: set()} if is_single else {}
    if not is_single and (root / INDEX).exists():
        listed_in = attempt(lambda: _read_weight_map(root, PathIn(where, INDEX)), problems)
        for tensor, path in (listed_in or {}).items():
            names_of.setdefault(path, set()).add(tensor)
    files = []
    for path, listed in names_of.items():
        file = attempt(lambda: read_header(root, path, PathIn(where, path)), problems)  # noqa: B023
        if file is None:
            continue
        files.append(file)
        for name in sorted(listed ^ set(file.tensors)) if not is_single else ():
            side = "lists but the file lacks" if name in listed else "does not list but the file has"
            problems.add(damaged(PathIn(where, path), f"{INDEX} {side} {name}"))
    return tuple(files)


def _read_weight_map(root: Path, where: str) -> dict[str, str]:
    weight_map = read_json(root / INDEX, where).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(path, str) for path in weight_map.values()):
        raise damaged(where, "the index has no weight_map of names to files")
    for path in dict.fromkeys(weight_map.values()):
        if Path(path).name != path or not path.endswith(".safetensors") or not path.isprintable():
            fix = "an index may only name .safetensors files in its own folder"
            raise SourceError.at(where, f"the index points to {path!r}", fix)
    return weight_map


def read_header(root: Path, path: str, where: str) -> WeightFile:
    """Return a file's header, checked against the size of the file. Raises SourceError if they don't match."""
    with open_source(root / path, where) as file:
        size = file.num_bytes
        if size < 8:
            what = f"the file is truncated: {size} bytes, fewer than the 8 that every safetensors file begins with"
            raise damaged(where, what, Code.FILE_DAMAGED)
        [length] = struct.unpack("<Q", file.read(0, 8))
        if not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
            what = f"the safetensors header is damaged (it has {length} bytes, the file {size})"
            raise damaged(where, what, Code.FILE_DAMAGED)
        text = file.read(8, 8 + length)
    try:
        header = read_strict_json(text)
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("the metadata is not a mapping of texts")
        json.dumps(metadata, ensure_ascii=False).encode()  # refuses unpaired surrogates
        tensors = {name: _held(path, entry, 8 + length) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise damaged(where, f"the safetensors header is damaged ({error})", Code.FILE_DAMAGED) from error
    for name in tensors:
        check_name(name, "a tensor", where)
    ordered = sorted(tensors.items(), key=lambda item: (item[1][1].start, item[1][1].stop))
    at = 8 + length
    for name, (_, extent) in ordered:
        if extent.start != at:
            raise damaged(where, f"{name} does not start where the previous tensor ends", Code.FILE_DAMAGED)
        at = extent.stop
    if at != size:
        kind = "truncated" if at > size else "too long"
        raise damaged(where, f"the file is {kind}: {size} bytes instead of {at}", Code.FILE_DAMAGED)
    return WeightFile(path, {name: held for name, (held, _) in ordered}, metadata)


def _held(path: str, entry: Any, data_start: int) -> tuple[TensorEntry, Extent]:
    dtype, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r:.40} is unknown")
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS or not all(map(is_count, (*shape, start, stop))):
        raise ValueError("a shape or an offset is not a count")
    if stop - start != math.prod(shape) * ITEMSIZE[dtype]:
        raise ValueError(f"{stop - start} bytes for a tensor of shape {shape} and dtype {dtype}")
    extent = Extent(path, data_start + start, data_start + stop)
    return TensorEntry(dtype, tuple(shape), Contiguous(extent, ITEMSIZE[dtype])), extent


class SafetensorsLayout(FileLayout):
    """A file whose header can be padded, so that the tensors share blocks with the files they are copied from."""

    def filled(self, fill: Fill) -> FileLayout:
        header, *tensors = self.pieces
        assert isinstance(header, Bytes), "the header comes first"
        content = fill_all(tensors, fill)
        return FileLayout(self.path, (lay_out_header(header.data[8:].rstrip(), shareable_start(content, 8)), *content))


def lay_out_header(text: bytes, stop: int | None = None) -> Bytes:
    """Return a header with its length, padded to a multiple of 8 bytes, or to ``stop`` modulo `BLOCK_BYTES`."""
    text += b" " * (-len(text) % 8 if stop is None else (stop - 8 - len(text)) % BLOCK_BYTES)
    return Bytes(struct.pack("<Q", len(text)) + text, "safetensors header")


def lay_out_weights(file: WeightFile, dtype: str | None) -> FileLayout:
    """Return the layout of a file with the same tensors in the same order; ``dtype`` replaces floating-point dtypes."""
    header: dict[str, Any] = {"__metadata__": dict(file.metadata)} if file.metadata else {}
    pieces: list[Segment] = []
    at = 0
    for name, held in file.tensors.items():
        state, begin = file.filled_by.get(name, (State(name, WEIGHT), 0))
        slot = Slot(state, target_dtype(held.dtype, dtype), begin, begin + held.numel)
        end = at + slot.num_bytes
        header[name] = {"dtype": slot.dtype, "shape": list(held.shape), "data_offsets": [at, end]}
        at = end
        if slot.num_bytes:
            pieces.append(slot)
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    return SafetensorsLayout(file.path, (lay_out_header(text), *pieces))


def lay_out_weight_files(files: tuple[WeightFile, ...], dtype: str | None) -> list[FileLayout]:
    """Return the layouts of all files and, if there are several, of their index."""
    layouts = [lay_out_weights(file, dtype) for file in files]
    return layouts if files[0].path == SINGLE else [*layouts, lay_out_index(files, dtype)]


def list_tied(files: tuple[WeightFile, ...], tied: Mapping[str, str], listed: bool) -> tuple[WeightFile, ...]:
    """Add tied names next to the names their values are stored under, or leave them out.

    ZeRO-1/2 runs write both to their safetensors, ZeRO-3 runs only the stored name.
    """
    changed = []
    for file in files:
        tensors = {name: held for name, held in file.tensors.items() if listed or name not in tied}
        for name, stored in tied.items():
            if listed and stored in tensors:
                tensors.setdefault(name, tensors[stored])
        changed.append(WeightFile(file.path, tensors, file.metadata))
    return tuple(changed)


def lay_out_index(files: tuple[WeightFile, ...], dtype: str | None) -> FileLayout:
    """Return the layout of the index of several files."""
    weight_map = {name: file.path for file in files for name in file.tensors}
    tensors = [held for file in files for held in file.tensors.values()]
    total = sum(held.numel * ITEMSIZE[target_dtype(held.dtype, dtype)] for held in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return FileLayout(INDEX, (Bytes(json.dumps(index, indent=2).encode() + b"\n", "safetensors index"),))


def target_dtype(own: str, wanted: str | None) -> str:
    """Return the dtype that a tensor is written in: only floating-point weights follow ``wanted``."""
    return wanted if wanted and own in ("F32", "F16", "BF16") else own
