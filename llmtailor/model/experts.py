"""Experts of a mixture-of-experts layer as parts of their own: ``layer 3 expert 5``. Pure.

Models keep experts in two forms. As modules (``mlp.experts.5.up_proj.weight``), each has tensors of its own.
transformers 5 fuses them: ``mlp.experts.gate_up_proj`` has one expert after the other along dimension 0, so an expert
is a run of elements, a `Piece`. A piece is named like a tensor of its own, ``mlp.experts.5.gate_up_proj``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import replace

from llmtailor.model.parts import ModelStructure, Piece, expert_part, layer_number, non_expert_part

_OWN = re.compile(r"(?:.+\.)?experts\.([0-9]{1,5})\..+")
_FUSED = re.compile(r"((?:.+\.)?experts)\.([^.]+)")
_MOST = 4096
"""More experts than any layer has; a hostile file may claim more"""


def split_experts(
    structure: ModelStructure, shapes: Mapping[str, tuple[int, ...]], layers: Collection[str] | None = None
) -> ModelStructure:
    """Return the parts with each expert of these layers as a part; None means all layers. Others stay as they are.

    ``shapes`` are those of the params; buffers have an empty one. Other names are those of weights on disk. A layer
    stays whole if its experts are fused in memory, and on disk too but under other names: which elements of these
    belong to an expert is unknown.
    """
    numbers: dict[str, int] = {}
    pieces: dict[str, dict[str, tuple[int, Piece]]] = {}
    for layer in structure.parts:
        if layer_number(layer) is None or (layers is not None and layer not in layers):
            continue
        names = structure.names(layer)
        own = {name: int(match[1]) for name in names if (match := _OWN.fullmatch(name))}
        fused = _pieces([name for name in names if name not in own], shapes)
        if fused and not own and any(name not in shapes for name in names):
            continue
        made = {piece for of_param in fused.values() for piece in of_param}
        if made.isdisjoint(structure.part_of):
            numbers |= own
            pieces |= fused
    if not numbers and not pieces:
        return structure

    part_of: dict[str, str] = {}
    shares: dict[str, dict[int, str]] = {}  # layer -> expert, -1 for the rest, -> part
    split = {structure.part_of[name] for name in (*numbers, *pieces)}
    for name, part in structure.part_of.items():
        at = layer_number(part)
        if part not in split or at is None:
            part_of[name] = part
            continue
        own_pieces = {piece: number for piece, (number, _) in pieces.get(name, {}).items()}
        for one, number in (own_pieces or {name: numbers.get(name, -1)}).items():
            part_of[one] = expert_part(at, number) if number >= 0 else non_expert_part(at)
            shares.setdefault(part, {})[number] = part_of[one]

    in_order = {part: [of_one for _, of_one in sorted(found.items())] for part, found in shares.items()}

    def divide(parts: Collection[str]) -> tuple[str, ...]:
        return tuple(one for part in parts for one in in_order.get(part, [part]))

    return replace(
        structure,
        part_of=part_of,
        parts=divide(structure.parts),
        modules={module: divide(parts) for module, parts in structure.modules.items()},
        pieces={
            **structure.pieces,
            **{name: piece for of_param in pieces.values() for name, (_, piece) in of_param.items()},
        },
    )


def _pieces(names: Collection[str], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, dict[str, tuple[int, Piece]]]:
    """Return, for each fused param, its pieces by name with the expert's number.

    Params of a module ``experts`` are fused if all have the same first dimension, and one has a matrix for each expert.
    """
    modules: dict[str, dict[str, str]] = {}
    for name in names:
        if len(shapes.get(name, ())) > 1 and (match := _FUSED.fullmatch(name)):
            modules.setdefault(match[1], {})[name] = match[2]
    found = {}
    for module, leaves in modules.items():
        counts = {shapes[name][0] for name in leaves}
        if len(counts) > 1 or max(len(shapes[name]) for name in leaves) < 3 or not 1 < max(counts) <= _MOST:
            continue
        for name, leaf in leaves.items():
            each = math.prod(shapes[name][1:])
            found[name] = {
                f"{module}.{number}.{leaf}": (number, Piece(name, number * each, (number + 1) * each))
                for number in range(shapes[name][0])
            }
    return found
