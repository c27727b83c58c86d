"""Are two unpickled trees the same, to the bit, the type and the order of keys?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from oracle.zero3 import differ

NESTED = "__bnb_optimizer_quant_state__"


def assert_same(one: Any, other: Any, at: str = "") -> None:
    found = [*differences(one, other, at)]
    assert not found, found


def differences(one: Any, other: Any, at: str = "") -> Iterator[str]:
    """Say where they differ, and how."""
    if type(one) is not type(other):
        yield f"{at}: {one!r} is a {type(one).__name__}, {other!r} is a {type(other).__name__}"
    elif isinstance(one, torch.Tensor):
        if difference := differ(one, other):
            yield f"{at}: {difference}"
        if one.requires_grad != other.requires_grad:
            yield f"{at}: requires_grad"
    elif isinstance(one, np.ndarray):
        if not np.array_equal(one, other):
            yield f"{at}: arrays"
    elif isinstance(one, dict):
        if list(one) != list(other):
            yield f"{at}: keys {list(one)}, not {list(other)}"
        for key in one.keys() & other.keys():
            yield from differences(one[key], other[key], f"{at}[{key!r}]")
        if getattr(one, "__dict__", None) != getattr(other, "__dict__", None):
            yield f"{at}: attributes {one.__dict__}, not {other.__dict__}"
    elif isinstance(one, (list, tuple)):
        if len(one) != len(other):
            yield f"{at}: {len(one)} items, not {len(other)}"
        for number, (mine, its) in enumerate(zip(one, other, strict=False)):
            yield from differences(mine, its, f"{at}[{number}]")
    elif hasattr(one, "__dict__"):
        yield from differences(vars(one), vars(other), f"{at}.__dict__")
    elif one != other:
        yield f"{at}: {one!r}, not {other!r}"


def plain(value: Any) -> Any:
    """Return a state with inner tensors in place of quantized ones, flat as in memory."""
    if isinstance(value, dict):
        flat = {key: one for key, one in value.items() if key != NESTED}
        return {key: plain(one) for key, one in sorted({**flat, **value.get(NESTED, {})}.items())}
    if type(value).__module__.startswith("torchao"):
        names, rest = value.__tensor_flatten__()
        return type(value).__name__, rest, {name: getattr(value, name) for name in names}
    return value
