"""Megatron's tensors and the params of Hugging Face models: which elements are which. Pure.

Megatron-core 0.16.1 fuses what one matrix product needs, and stacks the layers unless they differ::

    decoder.layers.mlp.linear_fc2.weight         (layers, hidden, ffn)
    decoder.layers.3.mlp.linear_fc2.weight       (hidden, ffn)       with non_homogeneous_layers

Tensor and pipeline parallelism leave no trace: all tensors are whole. The experts of a layer are one more dimension, as
transformers 5 has them in memory. So a param is runs of elements of one tensor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

WHOLE, HALVES, QKV, VOCAB = "whole", "halves", "qkv", "vocab"
"""One param; two, one above the other; the rows of three, for each group of queries together; a param whose rows end
before the padding"""


@dataclass(frozen=True, slots=True)
class NameRule:
    key: str
    """Megatron's; in a layer without ``decoder.layers.N.``"""
    params: tuple[str, ...]
    """Without ``model.layers.N.``"""
    how: str = WHOLE


def _qkv(word: str) -> NameRule:
    params = tuple(f"self_attn.{one}_proj.{word}" for one in "qkv")
    return NameRule(f"self_attention.linear_qkv.{word}", params, QKV)


_ENDS = (
    NameRule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), VOCAB),
    NameRule("decoder.final_layernorm.weight", ("model.norm.weight",)),
    NameRule("output_layer.weight", ("lm_head.weight",), VOCAB),
)
_IN_LAYER = (
    _qkv("weight"),
    _qkv("bias"),
    NameRule("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",)),
    NameRule("self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",)),
    NameRule("self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",)),
    NameRule("mlp.linear_fc1.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), HALVES),
    NameRule("mlp.linear_fc2.weight", ("mlp.down_proj.weight",)),
    NameRule("mlp.router.weight", ("mlp.gate.weight",)),
    NameRule("mlp.experts.experts.linear_fc1.weight", ("mlp.experts.gate_up_proj",)),
    NameRule("mlp.experts.experts.linear_fc2.weight", ("mlp.experts.down_proj",)),
    NameRule("self_attention.linear_qkv.layer_norm_weight", ("input_layernorm.weight",)),
    NameRule("mlp.linear_fc1.layer_norm_weight", ("post_attention_layernorm.weight",)),
    # other specs of a layer do not fuse the norms
    NameRule("input_layernorm.weight", ("input_layernorm.weight",)),
    NameRule("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",)),
)
"""In the order of the model. Of two rows with the same params, a layer that is written has the first; one of experts
has `_OF_EXPERTS`."""
_OF_EXPERTS = {"mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight"}
HEAD, EMBEDDING = _ENDS[2].params[0], _ENDS[0].params[0]
LAYERS = "decoder.layers."
_KEY = re.compile(r"decoder\.layers\.(?:([0-9]{1,6})\.)?(.+)")
_FUSED = re.compile(r"linear_qkv\.(weight|bias)$")
"""Beside it is the projection behind the attention, whose columns are the rows of the queries"""
_PARAM = re.compile(r"model\.layers\.([0-9]{1,6})\.(.+)")
_ROWS = {row.key: row for row in (*_ENDS, *(NameRule(LAYERS + one.key, one.params, one.how) for one in _IN_LAYER))}
_MODULES = [*dict.fromkeys(name.rpartition(".")[0] for row in _IN_LAYER for name in row.params)]
"""In the order of the model"""


@dataclass(frozen=True, slots=True)
class Selection:
    """A param as elements of one of Megatron's tensors, see `checkpoint.placement.StridedRuns`."""

    param: str
    shape: tuple[int, ...]
    key: str
    cuts: tuple[int, ...]
    offsets: tuple[int, ...]


def split_key(key: str) -> tuple[str, int | None]:
    """Return a key without the number of its layer, and that number; None if it has none."""
    match = _KEY.fullmatch(key)
    return (LAYERS + match[2], int(match[1])) if match and match[1] else (key, None)


def is_known(key: str) -> bool:
    return split_key(key)[0] in _ROWS


def is_expert(key: str) -> bool:
    return ".mlp.experts." in key


def layer_shape(key: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a tensor in one layer."""
    return shape[1:] if key.startswith(LAYERS) and split_key(key)[1] is None else shape


def has_row(param: str) -> bool:
    match = _PARAM.fullmatch(param)
    return (match[2] if match else param) in {name for row in (_IN_LAYER if match else _ENDS) for name in row.params}


def place_of(param: str) -> tuple[int, int, bool]:
    """Return a key that sorts params with a row in the order of the model."""
    if match := _PARAM.fullmatch(param):
        return int(match[1]), _MODULES.index(match[2].rpartition(".")[0]), param.endswith(".bias")
    return (-1, 0, False) if param == EMBEDDING else (1 << 30, int(param == HEAD), False)


def has_decay(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether Megatron decays a param, or its tensor in a layer: biases and vectors it does not."""
    return len(shape) > 1 and not name.endswith(".bias")


def select(shapes: Mapping[str, tuple[int, ...]], groups: int, vocab: int) -> list[Selection]:
    """Return the params in known tensors, in the order of the model. Raises ValueError for shapes that don't fit."""
    found: list[Selection] = []
    for key, shape in shapes.items():
        name, number = split_key(key)
        row, each = _ROWS[name], layer_shape(key, shape)
        if not name.startswith(LAYERS):
            found += _in_layer(row, key, each, 0, "", (groups, vocab, 0))
            continue
        queries = shapes[_FUSED.sub("linear_proj.weight", key)][-1] if row.how == QKV else 0
        layers = range(shape[0]) if number is None else (number,)
        for at, layer in enumerate(layers):
            start = at * math.prod(each)
            found += _in_layer(row, key, each, start, f"model.layers.{layer}.", (groups, vocab, queries))
    if len(params := {one.param for one in found}) != len(found):
        raise ValueError(f"{len(found)} tensors have the names of {len(params)} params")
    return sorted(found, key=lambda one: place_of(one.param))


def _in_layer(
    row: NameRule, key: str, shape: tuple[int, ...], start: int, prefix: str, facts: tuple[int, int, int]
) -> Iterator[Selection]:
    (groups, vocab, queries), numel = facts, math.prod(shape)
    rows, rest = (shape[0], shape[1:]) if shape else (1, ())
    width = math.prod(rest)
    if row.how in (WHOLE, VOCAB):
        have = vocab if row.how == VOCAB else rows
        if have > rows:
            raise ValueError(f"{key} has {rows} rows for a vocabulary of {have}")
        yield Selection(prefix + row.params[0], (have, *rest), key, (0, have * width), (start,))
    elif row.how == HALVES:
        if rows % 2:
            raise ValueError(f"{key} has {rows} rows, no two halves")
        for half, param in enumerate(row.params):
            yield Selection(prefix + param, (rows // 2, *rest), key, (0, numel // 2), (start + half * (numel // 2),))
    else:
        others = (rows - queries) // 2
        if rows != queries + 2 * others or queries % groups or others % groups or others <= 0:
            raise ValueError(f"{key} has {rows} rows, {queries} of them of queries, but {groups} groups")
        sizes, before = (queries // groups, others // groups, others // groups), 0
        for size, param in zip(sizes, row.params, strict=True):
            cuts = tuple(accumulate([size * width] * groups, initial=0))
            offsets = tuple(start + (group * (rows // groups) + before) * width for group in range(groups))
            yield Selection(prefix + param, (size * groups, *rest), key, cuts, offsets)
            before += size


def stack(params: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return the tensors that hold params, with stacked layers. Raises LookupError with the names that have no row."""
    rows = {row.params: row for row in reversed((*_ENDS, *_IN_LAYER))}
    owner = {param: row for row in rows.values() for param in row.params}
    numbered = {name: match.groups() if (match := _PARAM.fullmatch(name)) else ("", name) for name in params}
    if unknown := [name for name, (_, rest) in numbered.items() if rest not in owner]:
        raise LookupError(unknown)
    layers = {int(number) for number, _ in numbered.values() if number}
    experts = any(rest == "mlp.experts.gate_up_proj" for _, rest in numbered.values())
    keys: dict[str, tuple[int, ...]] = {}
    lacking = []
    for row in dict.fromkeys(owner[rest] for _, rest in numbered.values()):
        inside = row in _IN_LAYER
        names = [
            [f"model.layers.{layer}.{param}" if inside else param for param in row.params]
            for layer in (range(len(layers)) if inside else (0,))
        ]
        lacking += [name for one in names for name in one if name not in params]
        if lacking:
            continue
        shapes = {_joined([params[name] for name in one]) for one in names}
        if len(shapes) != 1:
            raise LookupError(names[0])
        key = _OF_EXPERTS.get(row.key, row.key) if experts else row.key
        keys[LAYERS + key if inside else key] = (len(layers), *shapes.pop()) if inside else shapes.pop()
    if lacking:
        raise LookupError(lacking)
    return keys


def _joined(shapes: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    shapes = [*shapes]
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])
