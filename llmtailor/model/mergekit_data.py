"""mergekit's architecture data, if it is installed: what tensor names alone don't show.

mergekit itself is not imported: only its JSON files are read, and only when something must be looked up. Newer versions
of the data mark embeddings by ``vocabulary_axis``, older ones by ``is_embed``.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from llmtailor.model.roles import LAYER, ArchHints, place_of

TEXT_MODULES = ("default", "text_decoder", "text_model", "language_model", "decoder")
"""mergekit's names for the text model; ``default`` if there are no submodels"""

Weight = Mapping[str, Any]


def architecture_hints(config: Mapping[str, Any]) -> ArchHints | None:
    """Return mergekit's data on the model with this config.json; None if mergekit is not installed or has none."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if not isinstance(name, str):
        return None
    found = [each for each in _definitions(name) if name in each.get("architectures", [])]
    if len(found) > 1:  # the same class with different tensor names: Phi-2 before and after its renaming
        found = [each for each in found if each.get("model_type") == config.get("model_type")]
    try:
        return read_definition(found[0]) if found else None
    except (AttributeError, KeyError, TypeError):  # from a version with another format
        return None


def read_definition(definition: Mapping[str, Any]) -> ArchHints | None:
    """Return the hints in one of mergekit's architecture definitions; None if there are none."""
    modules = definition.get("modules") if definition.get("kind") == "modular" else None
    modules = modules or {"default": {"architecture": definition}}
    text = next((name for name in TEXT_MODULES if name in modules), None)
    if text is None:
        return None
    # The text model first: its embeddings take precedence over those that submodels share.
    ordered = {text: modules[text], **modules}
    pre, layers, post = _weights(modules[text])
    embed = [weight for each in ordered.values() for weight in _weights(each)[0] if _is_vocabulary(weight)][:1]
    head = [weight for each in ordered.values() for weight in _weights(each)[2] if _is_vocabulary(weight)]
    stack = next((weight["name"].split(f".{LAYER}.")[0] for weight in layers if f".{LAYER}." in weight["name"]), None)
    return ArchHints(
        stack,
        _names(embed),
        _names(_norms(pre, post, stack)),
        _names(head),
        {name: _names([weight for group in _weights(each) for weight in group]) for name, each in modules.items()}
        if len(modules) > 1
        else {},
    )


def _definitions(architecture: str) -> Iterator[Mapping[str, Any]]:
    """Yield the definitions that mention an architecture."""
    for path in _files():
        try:
            text = path.read_text(encoding="utf-8")
            if f'"{architecture}"' in text and isinstance(definition := json.loads(text), dict):
                yield definition
        except (OSError, ValueError):  # from another version, or damaged: treated as unknown
            continue


def _files() -> list[Path]:
    try:
        spec = importlib.util.find_spec("mergekit")  # for a top-level name, this imports nothing
    except ValueError:
        return []
    folders = spec.submodule_search_locations if spec else None
    return sorted(path for folder in folders or () for path in Path(folder, "_data", "architectures").glob("*.json"))


def _weights(module: Mapping[str, Any]) -> tuple[list[Weight], list[Weight], list[Weight]]:
    """Return the weights of a submodel before, in and after its layers, with their full names."""
    prefix = module.get("weight_prefix") or ""
    if prefix and not prefix.endswith("."):
        prefix += "."
    content = module.get("architecture") or {}
    inside = (content.get("layer_templates") or {}).get("weights")
    full: list[list[Weight]] = [[], [], []]
    for group, weights in zip(full, (content.get("pre_weights"), inside, content.get("post_weights")), strict=True):
        for weight in weights or ():
            name, *aliases = (prefix + name for name in (weight["name"], *(weight.get("aliases") or ())))
            group.append({**weight, "name": name, "aliases": aliases})
    return full[0], full[1], full[2]


def _names(weights: Sequence[Weight]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for weight in weights for name in (weight["name"], *weight["aliases"])))


def _is_vocabulary(weight: Weight) -> bool:
    return weight.get("vocabulary_axis") is not None or bool(weight.get("is_embed"))


def _norms(pre: Sequence[Weight], post: Sequence[Weight], stack: str | None) -> list[Weight]:
    """Return the final norm: after the layers, or else next to the stack (LFM2 lists it before them)."""
    around = place_of(f"{stack}.0.weight").module[:-1] if stack is not None else None
    behind = [weight for weight in post if not _is_vocabulary(weight) and _is_norm(weight)]
    return behind or [weight for weight in pre if _is_norm(weight) and place_of(weight["name"]).path[:-1] == around]


def _is_norm(weight: Weight) -> bool:
    module = weight["name"].split(".")[-2:][0].lower()
    return "norm" in module or module.startswith("ln") or module.endswith("ln")
