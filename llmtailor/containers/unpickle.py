"""The only reader of pickles: it decodes them as data, runs nothing, and refuses what no checkpoint needs.

`pickle_machine` decodes; this module lists what may be named and called. Nothing is run in any case. Names that are not
on the list are still refused, because what we read is written into checkpoints that stock ``torch.load`` opens without
protection.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping
from typing import Any

from llmtailor.codes import Code
from llmtailor.containers.pickle_machine import GETATTR, MAX_OPCODES, FindStorage, Machine, ObjectKey
from llmtailor.containers.pickle_nodes import REBUILD_TENSOR, STORAGE_DTYPES, Call, Global, Ordered, as_tensor, children
from llmtailor.errors import ObjectKeys, Problem, UnsafePickle, damaged

_NUMPY = {
    "numpy": {"ndarray", "dtype"},
    "numpy._core.multiarray": {"_reconstruct", "scalar"},
    "numpy.core.multiarray": {"_reconstruct", "scalar"},
}
_TORCH_DTYPES = {
    *("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"),
    *("float8_e4m3fn", "float8_e5m2", "complex64"),
}
ALLOWED: dict[str, set[str]] = {
    "collections": {"OrderedDict"},
    "builtins": {"set"},
    "__builtin__": {"set"},
    "_codecs": {"encode"},
    "torch": {"Size", "Tensor", "device", *_TORCH_DTYPES, *STORAGE_DTYPES},
    "torch.nn.parameter": {"Parameter"},
    "torch._utils": {"_rebuild_tensor_v2", "_rebuild_parameter", "_rebuild_parameter_with_state"},
    "torch._tensor": {"_rebuild_from_type_v2"},
    **_NUMPY,
    # DeepSpeed's own, under their paths since 0.14; written back by name
    "deepspeed.runtime.zero.config": {"ZeroStageEnum"},
    "deepspeed.runtime.fp16.loss_scaler": {"LossScaler", "DynamicLossScaler"},
    "deepspeed.utils.tensor_fragment": {"fragment_address"},
}
"""Every global that a checkpoint's pickle may name: module -> names."""

_ONLY_NAMED = {
    "torch": ALLOWED["torch"] - {"Size", "device"},
    "torch.nn.parameter": {"Parameter"},
    "numpy": {"ndarray"},
}
"""Globals that no checkpoint's pickle calls: ``torch.FloatStorage(10**12)`` would be a bomb."""
_REBUILD_TYPED = Global("torch._tensor", "_rebuild_from_type_v2")

MAX_DEPTH = 100
"""Deeper nesting is refused. Real checkpoints nest about ten levels."""
MAX_NODES = 32_000_000
"""Nodes of the tree, a shared one counted each time it is reached: all later code may walk the tree freely."""
_CONTAINERS = (dict, list, tuple, set, Call)
_LEAVES = {str, int, Global}
"""Most of what is not a container"""
_SHOWN = 20


def read_pickle(
    data: bytes,
    where: str,
    find_storage: FindStorage | None = None,
    any_names: bool = False,
    *,
    allowed: Mapping[str, Collection[str]] = ALLOWED,
    object_keys: bool = False,
    max_opcodes: int = MAX_OPCODES,
) -> Any:
    """Return a pickle decoded into plain values and nodes.

    ``find_storage(dtype, key, numel, location)`` turns a torch persistent id into a `Storage`; without it
    persistent ids are refused. ``any_names`` accepts globals that are not on the list ``allowed``, as names.
    ``object_keys`` permits objects as keys of dicts.
    Raises UnsafePickle, with every name, for globals not on the allow-list, ObjectKeys for a dict with objects as
    keys, and SourceError for a pickle that is incomplete, damaged or crafted to exhaust memory or time.
    """
    machine, damage = Machine(data, find_storage, object_keys, max_opcodes), None
    try:
        tree = machine.run()
        check_tree(tree)
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError, struct.error) as error:
        damage = error
    refused = [name for name in machine.globals if name.name not in allowed.get(name.module, ())]
    if damage is None and any(name in GETATTR for name in refused):  # fine for members of enums, which are decoded
        named = _named(tree, set())
        refused = [name for name in refused if name not in GETATTR or name in named]
    if refused and not any_names:
        unsafe = UnsafePickle([_unsafe(name, where) for name in refused[:_SHOWN]])
        unsafe.names = tuple((name.module, name.name) for name in refused)
        raise unsafe from damage
    if isinstance(damage, ObjectKey):
        fix = "leave this checkpoint out, or save it again without that dict"
        raise ObjectKeys.at(where, f"a dict can't be read: it has {damage}", fix) from damage
    if damage is not None:
        missing = isinstance(damage, (IndexError, KeyError))
        what = f"the pickle is damaged ({'it refers to missing items' if missing else damage})"
        raise damaged(where, what, Code.FILE_DAMAGED) from damage
    return tree


def check_tree(tree: Any) -> None:
    """Raise ValueError for a tree crafted to exhaust the memory or time of code that walks or loads it."""
    _measure(tree, 0, {})


def _named(node: Any, done: set[int]) -> set[Global]:
    """Return the globals that are left in a decoded tree."""
    if isinstance(node, Global):
        return {node}
    if not isinstance(node, _CONTAINERS) or id(node) in done:
        return set()
    done.add(id(node))
    return set().union(*(_named(child, done) for child in children(node)))


def _unsafe(name: Global, where: str) -> Problem:
    return Problem(
        where,
        f"the pickle names {name}, which no checkpoint needs",
        "do not load this file with torch.load unless you trust it; leave this checkpoint out, or save it again "
        "without that object",
        Code.UNSAFE_PICKLE,
    )


def _measure(node: Any, depth: int, done: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """Return a container's depth and size. Raises ValueError for cycles, excess or forbidden calls."""
    known = done.get(id(node))
    if known is not None:
        if known[0] == 0:
            raise ValueError("it contains itself")
        return known
    if depth > MAX_DEPTH:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")
    done[id(node)] = (0, 0)
    if isinstance(node, Call):
        _check_call(node)
    height, size = 1, 1
    for child in children(node):
        size += 1
        if type(child) not in _LEAVES and isinstance(child, _CONTAINERS) and (child or isinstance(child, Ordered)):
            below, inside = _measure(child, depth + 1, done)
            height, size = max(height, below + 1), size + inside
    if height > MAX_DEPTH:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")
    if size > MAX_NODES:
        raise ValueError(f"it expands to more than {MAX_NODES:,} values")
    done[id(node)] = (height, size)
    return height, size


def _check_call(node: Call) -> None:
    if node.func.name in _ONLY_NAMED.get(node.func.module, ()):
        raise ValueError(f"it calls {node.func}, which checkpoints only name")
    if node.func.name == REBUILD_TENSOR.name and node.func == REBUILD_TENSOR:  # to compare whole names takes longer
        view = as_tensor(node)
        if view is None or not view.fits:
            raise ValueError("a tensor extends beyond its storage")
    if node.func.name == _REBUILD_TYPED.name and node.func == _REBUILD_TYPED:  # which calls its first argument
        inner = node.args[0] if node.args else None
        if not isinstance(inner, Global) or inner.module != "torch._utils":
            raise ValueError(f"it calls {node.func} for something other than a tensor")
