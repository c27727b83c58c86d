"""Names of a model's params in safetensors files where they differ from the names in memory.

Since version 5, transformers fuses the experts of a MoE into one param per layer, but saves them one by one under
their old names; it renames params of other families. Its table (``conversion_mapping.py``) grows with every version, so
only verified families are listed here; the names of any other family count as unknown.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from llmtailor.model.parts import Param, SavedAs

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
