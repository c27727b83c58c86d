"""A `DcpKeyLayout` as the object tree in which a partial checkpoint keeps it.

::

    {model, optimizer, is_flat, form,
     others: [{path, object} or {path, dtype, shape, boxes: [(offsets, sizes, tensor)]}]}
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from llmtailor.checkpoint.index import FOLDERS, FULL, SHARDS, DcpEntry, DcpKeyLayout
from llmtailor.checkpoint.layout import Copy
from llmtailor.codes import Code
from llmtailor.containers.json import as_dict, get, read_tensor
from llmtailor.containers.unpickle import as_ints, make_tensor
from llmtailor.errors import damaged
from llmtailor.model.roles import ITEMSIZE

STYLE = "dcp/style"
"""The name of the tree; no stock file has it"""


def style_tree(style: DcpKeyLayout) -> dict[str, Any]:
    """Return a style as a tree, which `read_style` reads back."""
    return {
        "model": style.model,
        "optimizer": style.optimizer,
        "is_flat": style.is_flat,
        "form": style.form,
        "others": [_entry_tree(entry) for entry in style.others.values()],
    }


def _entry_tree(entry: DcpEntry) -> dict[str, Any]:
    if not entry.is_tensor:
        return {"path": entry.path, "object": entry.content}
    dtype, shape, boxes = entry.content
    tensors = [
        (offsets, sizes, make_tensor(dtype, sizes, (Copy(extent),) if extent.num_bytes else ()))
        for offsets, sizes, extent in boxes
    ]
    return {"path": entry.path, "dtype": dtype, "shape": shape, "boxes": tensors}


def read_style(tree: Any, where: str) -> DcpKeyLayout:
    """Return the style in a tree. Raises SourceError for one that `style_tree` did not make."""
    tree = as_dict(tree, "the file", where)
    words = [get(tree, key, str, where) for key in ("model", "optimizer", "form")]
    if words[2] not in (FOLDERS, SHARDS, FULL):
        raise damaged(where, f"form {words[2]!r:.40} is unknown", Code.FIELD_RANGE)
    entries = [_read_entry(node, where) for node in get(tree, "others", list, where)]
    others = {".".join(map(str, entry.path)): entry for entry in entries}
    return DcpKeyLayout(words[0], words[1], get(tree, "is_flat", bool, where), words[2], others)


def _read_entry(node: Any, where: str) -> DcpEntry:
    node = as_dict(node, "a value", where)
    path = get(node, "path", tuple, where)
    if not path or not all(type(word) in (str, int) for word in path):
        raise damaged(where, "the path of a value is not one", Code.FIELD_TYPE)
    if "object" in node:
        return DcpEntry(path, node["object"])
    dtype, shape = get(node, "dtype", str, where), as_ints(node.get("shape"))
    if dtype not in ITEMSIZE or shape is None:
        raise damaged(where, "a tensor has no dtype or shape", Code.FIELD_TYPE)
    return DcpEntry(path, (dtype, shape, tuple(_read_boxes(node, dtype, shape, where))), is_tensor=True)


def _read_boxes(node: dict[str, Any], dtype: str, shape: tuple[int, ...], where: str) -> Iterator[tuple[Any, ...]]:
    for box in get(node, "boxes", list, where):
        offsets, sizes = map(as_ints, box[:2]) if isinstance(box, tuple) and len(box) == 3 else (None, None)
        tensor = None if offsets is None or sizes is None else read_tensor(box[2], "a box", where)
        if tensor is None or (tensor.dtype, tensor.shape) != (dtype, sizes) or not len(shape) == len(offsets or ()):
            raise damaged(where, "a box does not fit its tensor", Code.FIELD_TYPE)
        yield offsets, sizes, tensor.extent


def cut_rows(rows: int, ranks: int) -> list[tuple[int, int]]:
    """Return the rows of each rank, as FSDP2 cuts them (``torch.chunk``); the last ones may be empty."""
    size = -(-rows // ranks)
    return [(min(rank * size, rows), min((rank + 1) * size, rows)) for rank in range(ranks)]
