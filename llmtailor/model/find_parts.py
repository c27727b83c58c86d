"""Finds the parts of a model: layers, modules around them, and experts.

Models keep experts in two forms. As modules (``mlp.experts.5.up_proj.weight``), each has tensors of its own.
transformers 5 fuses them: ``mlp.experts.gate_up_proj`` has one expert after the other along dimension 0, so an expert
is a run of elements, an `ExpertSlice`. A piece is named like a tensor of its own, ``mlp.experts.5.gate_up_proj``.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from llmtailor.model.mergekit_data import architecture_hints
from llmtailor.model.parts import (
    EMBED,
    HEAD,
    NORM,
    ExpertSlice,
    ModelStructure,
    Part,
    expert_part,
    layer_part,
    non_expert_part,
)
from llmtailor.model.roles import LAYER, ArchHints, Key, Place, find_roles, find_stack, place_of, stored_name, undecided

# Words with another meaning in selectors, so no part may have one as its name.
RESERVED = re.compile(r"embed_tokens|norm|lm_head|layer \d+|all|layers|even|odd|first|last|\d+")


def find_parts_by_name(
    names: Collection[str], tied: Mapping[str, str], numels: Mapping[str, int], hints: ArchHints | None = None
) -> ModelStructure:
    """Return the part of the model that each tensor belongs to.

    `names` are all params, buffers and safetensors weights, in the order of the model: parts other than the well-known
    ones are listed as they appear. `tied` maps a tied name to the name its values are stored under; tied names get a
    part even when `names` lacks them. `numels` holds element counts, as far as known: they decide which of several
    stacks is the main one. For names that occur in the model, `hints` take precedence over guesses from the names.

    The main stack is that of the text decoder. Layers of other stacks, and modules outside the stacks, are parts named
    by their path (``visual.blocks.0``, ``visual.patch_embed.proj``, ``wpe``), without wrappers and without the prefix
    that they share with the main stack. Never raises: a model without numbered modules has no layers.
    """
    stored = {name: stored_name(name, tied) for name in dict.fromkeys([*names, *tied])}
    places = {name: place_of(name) for name in dict.fromkeys([*stored, *stored.values()])}
    main = find_stack(places.values(), numels, hints)
    around = main[:-1] if main else ()
    roles, tied_embeddings = find_roles(stored, places, around, hints)

    others = [place for place in places.values() if place.path not in roles]
    titles = _titles(others, main, around)
    # Counted over the names themselves, so a layer entirely tied to another one counts.
    numbers = {place.number for place in others if place.module == main and place.number is not None}
    # If the stack itself contains the embeddings (nn.Sequential), layers begin after them and still count from 0.
    inside = (place for place in places.values() if place.number is not None and place.path in roles)
    first = min(numbers, default=0) if any(place.module == main for place in inside) else 0

    part_of: dict[str, Part] = {}
    for name, holder in stored.items():
        place = places[holder]
        if (role := roles.get(place.path)) is not None:
            part_of[name] = role
        elif place.module == main and place.number is not None:
            part_of[name] = layer_part(place.number - first)
        else:
            part_of[name] = titles[holder]

    present = set(part_of.values())
    known = [EMBED, *(layer_part(number - first) for number in sorted(numbers)), NORM, HEAD]
    order = dict.fromkeys([part for part in known if part in present] + list(part_of.values()))
    num_layers = max(numbers, default=first - 1) + 1 - first
    modules = _submodels(part_of, hints) if hints else {}
    return ModelStructure(part_of, tuple(order), num_layers, tied_embeddings, modules)


def _submodels(part_of: Mapping[str, Part], hints: ArchHints) -> dict[str, tuple[Part, ...]]:
    """Return the parts of every submodel that the hints list.

    An unlisted tensor belongs to the submodel whose tensors share the longest path with it, if there is exactly one.
    """
    owners: dict[tuple[Key, bool], str] = {}
    for module, names in hints.modules.items():
        for name in names:
            place = place_of(name.replace(LAYER, "0"))
            owners.setdefault((place.module, place.number is not None), module)

    parts: dict[str, dict[Part, None]] = {module: {} for module in hints.modules}
    for name, part in part_of.items():
        place = place_of(name)
        owner = owners.get((place.module, place.number is not None)) or _nearest_owner(place.module, owners)
        if owner is not None:
            parts[owner][part] = None
    return {module: tuple(found) for module, found in parts.items() if found}


def _nearest_owner(module: Key, owners: Mapping[tuple[Key, bool], str]) -> str | None:
    shared: dict[str, int] = defaultdict(int)
    for (key, _), owner in owners.items():
        same = next((at for at, (one, other) in enumerate(zip(module, key, strict=False)) if one != other), None)
        shared[owner] = max(shared[owner], min(len(module), len(key)) if same is None else same)
    longest = max(shared.values(), default=0)
    nearest = [owner for owner, length in shared.items() if length == longest]
    return nearest[0] if longest and len(nearest) == 1 else None


def _titles(places: Iterable[Place], main: Key | None, around: Key) -> dict[str, Part]:
    """Return the parts outside the main stack, by tensor: the module's key without the prefix shared with the stack."""
    keys: dict[str, Key] = {}
    for place in places:
        if place.number is None:
            keys[place.name] = place.module
        elif place.module != main:
            keys[place.name] = (*place.module, str(place.number))

    sharers: dict[str, set[Key]] = defaultdict(set)
    for key in keys.values():
        sharers[_short(key, around)].add(key)

    titles = {}
    for name, key in keys.items():
        title = _short(key, around)
        if len(sharers[title]) > 1 or RESERVED.fullmatch(title):
            title = ".".join(key)
        titles[name] = Part(name if RESERVED.fullmatch(title) else title)
    return titles


def _short(key: Key, around: Key) -> str:
    shared = 0
    while shared < min(len(around), len(key) - 1) and key[shared] == around[shared]:
        shared += 1
    return ".".join(key[shared:])


def find_parts(
    names: Collection[str], tied: Mapping[str, str], numels: Mapping[str, int], config: Mapping[str, Any] | None
) -> ModelStructure:
    """Return the part of the model that each tensor belongs to, by its name, or by mergekit's data if that is unclear.

    `config` is the model's config.json. See `find_parts_by_name` for the rest. Reads mergekit's files if it is
    installed and the names are not conclusive; never raises.
    """
    structure = find_parts_by_name(names, tied, numels)
    if config is None or not undecided(structure):
        return structure
    hints = architecture_hints(config)
    return find_parts_by_name(names, tied, numels, hints) if hints else structure


_OWN = re.compile(r"(?:.+\.)?[0-9]+\.(?:.+\.)?experts\.([0-9]{1,5})\..+")
"""Below a layer: modules outside of layers may be called experts, too, and be tied to something in one"""
_FUSED = re.compile(r"((?:.+\.)?experts)\.([^.]+)")
_MOST = 4096
"""More experts than any layer has; a hostile file may claim more"""


def split_experts(
    structure: ModelStructure, shapes: Mapping[str, tuple[int, ...]], layers: Collection[Part] | None = None
) -> ModelStructure:
    """Return the parts with each expert of these layers as a part; None means all layers. Others stay as they are.

    ``shapes`` are those of the params; buffers have an empty one. Other names are those of weights on disk. A layer
    stays whole if its experts are fused in memory, and on disk too but under other names: which elements of these
    belong to an expert is unknown.
    """
    numbers: dict[str, int] = {}
    pieces: dict[str, dict[str, tuple[int, ExpertSlice]]] = {}
    for layer in structure.parts:
        if layer.layer is None or (layers is not None and layer not in layers):
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

    part_of: dict[str, Part] = {}
    shares: dict[Part, dict[int, Part]] = {}  # layer -> expert, -1 for the rest, -> part
    split = {structure.part_of[name] for name in (*numbers, *pieces)}
    for name, part in structure.part_of.items():
        at = part.layer
        if part not in split or at is None:
            part_of[name] = part
            continue
        own_pieces = {piece: number for piece, (number, _) in pieces.get(name, {}).items()}
        for one, number in (own_pieces or {name: numbers.get(name, -1)}).items():
            part_of[one] = expert_part(at, number) if number >= 0 else non_expert_part(at)
            shares.setdefault(part, {})[number] = part_of[one]

    in_order = {part: [of_one for _, of_one in sorted(found.items())] for part, found in shares.items()}

    def divide(parts: Collection[Part]) -> tuple[Part, ...]:
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


def _pieces(
    names: Collection[str], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, dict[str, tuple[int, ExpertSlice]]]:
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
                f"{module}.{number}.{leaf}": (number, ExpertSlice(name, number * each, (number + 1) * each))
                for number in range(shapes[name][0])
            }
    return found
