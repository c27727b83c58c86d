"""Mutates bytes, and values inside a JSON or pickle tree."""

from __future__ import annotations

import math
import random
import re
from typing import Any

from llmtailor.containers.unpickle import Call, Ordered

NUMBERS = (0, 1, 2, 7, 2**53, *(2**bits + more for bits in (6, 7, 8, 16, 31, 32) for more in (-1, 0)), 2**63, 2**64 - 1)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 3, 2**31, 2**53, 2**63, -(2**63), 10**30, 10**5000, 0.5, -1.0, 1e400, math.nan),
    *("", "x", "..", "../x", "/", "a\0b", "\n", "\x1b[31m", "layer 3", "layer x", "é", "x" * 5000, "9" * 5000, "²"),
    *([], {}, [[]], {"": 1}, [None], [-1], [2**62, 2**62], ["x"], {"x": {}}, [0] * 100),
)
TOKENS = (
    *rb"""{ } [ ] , : " ' - &a *a ! << null NaN 1e999 -1 \u0000 \ud800 .. / | > ? % @ #""".split(),
    *(b"\n", b" ", b"\t", b"&a ", b"\xff", b"9" * 400, b"{" * 50),
)


def mutate_bytes(data: bytes, other: bytes, rng: random.Random) -> bytes:
    """Change some bytes: a few times one of a dozen ways."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 8))):
        at = rng.randrange(len(out) + 1)
        until = min(len(out), at + rng.choice((1, 2, 4, 8, 16, 64, 256)))
        way = rng.randrange(10)
        if way == 0 and out:
            out[min(at, len(out) - 1)] ^= 1 << rng.randrange(8)
        elif way == 1 and out:
            out[min(at, len(out) - 1)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        elif way == 2:
            del out[at:until]
        elif way == 3:
            out[at:at] = out[at:until] * rng.choice((1, 1, 2, 20))
        elif way == 4:
            start = rng.randrange(len(other) + 1)
            out[at:until] = other[start : start + rng.choice((1, 4, 16, 64, 256))]
        elif way == 5:
            packed = rng.choice(NUMBERS).to_bytes(8, rng.choice(("little", "little", "big")))[
                : rng.choice((1, 2, 4, 8))
            ]
            out[at : at + len(packed)] = packed
        elif way == 6:
            out[at:at] = rng.choice(TOKENS)
        elif way == 7:
            del out[at:]
        elif way == 8:
            out += out[at:until]
        else:
            numbers = [match.span() for match in re.finditer(rb"[0-9]+", bytes(out))]
            if numbers:
                begin, end = rng.choice(numbers)
                out[begin:end] = str(rng.choice((*NUMBERS, -1, 10**20))).encode()
    return bytes(out)


def mutate_tree(tree: Any, rng: random.Random) -> Any:
    """Return a JSON or pickle tree with one value changed; nothing that was passed is."""
    path: list[Any] = []
    node = tree
    while isinstance(node, (dict, list, tuple, Call)) and (not path or rng.random() < 0.85):
        steps = _steps(node)
        if not steps:
            break
        path.append(rng.choice(steps))
        node = _child(node, path[-1])
    return _replaced(tree, path, rng)


def _steps(node: Any) -> list[Any]:
    if isinstance(node, Call):
        return ["args", "state"] if node.has_state else ["args"]
    return list(node) if isinstance(node, dict) else list(range(len(node)))


def _child(node: Any, step: Any) -> Any:
    return getattr(node, step) if isinstance(node, Call) else node[step]


DROP = object()


def _replaced(node: Any, path: list[Any], rng: random.Random) -> Any:
    if not path:
        return _other(node, rng)
    step, rest = path[0], path[1:]
    child = _replaced(_child(node, step), rest, rng)
    if isinstance(node, Call):
        changed = Call(node.func, node.args, node.new, node.state, node.has_state, list(node.items), list(node.appends))
        setattr(changed, step, child if step != "args" or isinstance(child, tuple) else ())
        return changed
    if isinstance(node, dict):
        items = [(key, child if key == step else value) for key, value in node.items()]
        if child is DROP:
            items = [(key, value) for key, value in items if key != step]
        elif not rest and rng.random() < 0.2:
            items = [(_key(rng, node) if key == step else key, value) for key, value in items]
        return Ordered(items, node.attributes) if isinstance(node, Ordered) else dict(items)
    listed = [child if at == step else value for at, value in enumerate(node)]
    if child is DROP:
        listed = [value for value in listed if value is not DROP]
    return tuple(listed) if isinstance(node, tuple) else listed


def _key(rng: random.Random, node: dict[Any, Any]) -> Any:
    return rng.choice((*node, "x", "", "layer x.weight", "step", "master", 0, 1, 7, "a\nb"))


def _other(node: Any, rng: random.Random) -> Any:
    way = rng.randrange(6)
    if way == 0:
        return DROP
    if way == 1 and type(node) in (int, float):
        return rng.choice((node + 1, node - 1, -node, node * 2**40, float(node), str(node)))
    if way == 2 and isinstance(node, (list, tuple)):
        return type(node)(rng.sample(list(node), len(node))) if rng.random() < 0.5 else type(node)([*node, *node])
    if way == 3 and isinstance(node, dict) and len(node) > 1:
        keys, values = list(node), list(node.values())
        rng.shuffle(values)
        return dict(zip(keys, values, strict=True))
    return rng.choice(VALUES)
