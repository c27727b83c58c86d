"""Tensor names as paths in the module tree.

The first integer in a name is a layer number; the path before it is a *stack*::

    model.language_model.layers . 3 . self_attn.q_proj.weight
    stack                         |   inside the layer
                                  number

Wrapper modules (``model``, ``language_model``, PEFT's ``base_model`` ...) mean nothing here and differ between memory
and disk: transformers keeps ``model.language_model.layers`` in memory and writes ``language_model.model.layers`` or
``model.layers`` to the safetensors file. So modules are compared by their *key*, the path without wrappers, which makes
both spellings of a layer the same part.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

Key = tuple[str, ...]
"""A module path without wrappers."""

WRAPPERS = frozenset({"model", "language_model", "base_model", "module", "_orig_mod", "_fsdp_wrapped_module"})

# The maximum number of digits of a layer number; a hostile file may have longer ones.
NUMBER = re.compile(r"[0-9]{1,6}")

# PEFT puts the original module and its own tensors below the module that they replace.
ADAPTER = re.compile(r"base_layer|original_module|modules_to_save|lora_.*|ia3_.*|token_adapter")

# Stacks other than the decoder: towers of other modalities, encoders, heads for multi-token prediction.
ASIDE = re.compile(
    r"vision|visual|image|video|audio|speech|encoder|talker|wav|mtp|nextn|draft|medusa|eagle"
    r"|projector|merger|resampler|perceiver|^vit$"
)


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a tensor in the module tree."""

    name: str
    module: Key
    """Key of its module, or of its stack for a tensor in a stack"""
    number: int | None
    """The layer's number, for a tensor in a stack"""
    depth: int
    """Names below the number: more than one in a transformer's layer, which has modules of its own"""
    path: Key
    """Key of the module that directly holds the tensor, numbers included"""


def place_of(name: str) -> Place:
    """Return the place that a tensor name describes."""
    components = name.split(".")
    modules = components[:-1]
    cut = next((at for at, word in enumerate(modules) if ADAPTER.fullmatch(word)), len(modules))
    for at, word in enumerate(components[:cut] if cut < len(modules) else components):
        if NUMBER.fullmatch(word):
            path = key_of(components[: max(cut, at + 1)])
            return Place(name, key_of(components[:at]), int(word), len(components) - at - 1, path)
    # A bare param of the model itself (image_newline) is its own module.
    module = key_of(modules[:cut]) or (components[-1],)
    return Place(name, module, None, 0, module)


def key_of(path: Iterable[str]) -> Key:
    """Return a path without wrappers."""
    return tuple(word for word in path if word not in WRAPPERS)


def is_aside(key: Key) -> bool:
    """Return whether a module is a tower, an encoder or an extra head, judging by its name."""
    return any(ASIDE.search(word) for word in key)


def stored_name(name: str, tied: Mapping[str, str]) -> str:
    """Return the name that a tensor's values are stored under; for a cycle of ties, one of its names."""
    seen = {name}
    while (target := tied.get(name)) is not None and target not in seen:
        seen.add(target)
        name = target
    return name
