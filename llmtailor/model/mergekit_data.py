"""What tensor names alone don't show of a model family: the roles of its tensors, and their names on disk.

Roles come from mergekit's architecture data, if it is installed. mergekit itself is not imported: only its JSON files
are read, and only when something must be looked up. Newer versions of the data mark embeddings by ``vocabulary_axis``,
older ones by ``is_embed``.

The names in safetensors files may differ from those in memory: since version 5, transformers fuses the experts of a MoE
into one param per layer, but saves them one by one under their old names; it renames params of other families. Its
table (``conversion_mapping.py``) grows with every version, so only verified families are listed here; the names of any
other family count as unknown.
"""

from __future__ import annotations

import importlib.util
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmtailor.model.parts import Param, SavedAs
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


UNCHANGED = frozenset(
    {
        *("apertus", "arcee", "bloom", "cohere", "cohere2", "exaone4", "falcon", "gemma", "gemma2", "glm", "glm4"),
        *("gpt2", "gpt_bigcode", "gptj", "granite", "helium", "llama", "mistral", "mpt", "olmo", "olmo2", "olmo3"),
        *("opt", "phi", "phi3", "qwen2", "qwen3", "seed_oss", "smollm3", "stablelm", "starcoder2"),
    }
)
"""``model_type`` of the models that have the same names in memory and on disk."""
_FUSED = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)")


@dataclass(frozen=True, slots=True)
class Naming:
    """A rule that derives names on disk from names in memory."""

    pattern: str = r"$^"
    """Regular expression for the part of a name that ``by`` replaces"""
    by: str = ""
    projections: tuple[str, ...] = ()
    """If experts are fused: names of an expert's gate, up and down projections. Gate and up are one param."""


AS_IN_MEMORY = Naming()
_QWEN_MOE = Naming(projections=("gate_proj", "up_proj", "down_proj"))
FAMILIES = {
    "gpt_neox": Naming(r"^lm_head\.", "embed_out."),
    "mixtral": Naming(r"\.mlp\.(gate\.|experts$)", r".block_sparse_moe.\1", ("w1", "w3", "w2")),
    "qwen2_moe": _QWEN_MOE,
    "qwen3_moe": _QWEN_MOE,
}


def naming_of(model_type: str | None) -> Naming | None:
    """Return the naming rule of a family, by config.json's ``model_type``; None if it is unknown.

    A model without config.json is not a transformers model, and the Trainer saves it under its names in memory.
    """
    return AS_IN_MEMORY if model_type is None or model_type in UNCHANGED else FAMILIES.get(model_type)


def on_disk(param: Param, naming: Naming) -> Iterator[SavedAs]:
    """Yield the tensors that a param is saved as: one, or one per projection of each expert fused in it."""
    fused = _FUSED.fullmatch(param.name) if naming.projections and len(param.shape) == 3 else None
    if fused is None:
        yield SavedAs(re.sub(naming.pattern, naming.by, param.name), param.shape)
        return
    module = re.sub(naming.pattern, naming.by, fused[1])
    projections = naming.projections[:2] if fused[2] == "gate_up_proj" else naming.projections[2:]
    count, rows, columns = param.shape
    shape = (rows // len(projections), columns)
    for number in range(count * len(projections)):
        expert, projection = divmod(number, len(projections))
        name = f"{module}.{expert}.{projections[projection]}.weight"
        yield SavedAs(name, shape, number * math.prod(shape))
