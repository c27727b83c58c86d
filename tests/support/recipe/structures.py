"""Made-up models to hold recipes against. Made here by hand, so that these tests don't lean on `find_parts_by_name`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from llmtailor.checkpoint.lineage import RunCheckpoint
from llmtailor.errors import Problem, RecipeError
from llmtailor.model.find_parts import split_experts
from llmtailor.model.parts import EMBED, HEAD, NORM, ModelStructure, Part, layer_part
from llmtailor.recipe import Recipe
from llmtailor.recipe.parse import parse_recipe

INSIDE = ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "mlp.up_proj.weight", "input_layernorm.weight")
EMBED_NAME, HEAD_NAME = "model.embed_tokens.weight", "lm_head.weight"


def llama(num_layers: int = 4, *, tied: bool = False, extra: dict[str, str] | None = None) -> ModelStructure:
    """Return a Llama-like model; `extra` are more names and their parts."""
    part_of = {EMBED_NAME: EMBED}
    for number in range(num_layers):
        part_of |= {f"model.layers.{number}.{tail}": layer_part(number) for tail in INSIDE}
    part_of["model.norm.weight"] = NORM
    part_of[HEAD_NAME] = EMBED if tied else HEAD
    part_of |= {name: Part(part) for name, part in (extra or {}).items()}
    return ModelStructure(part_of, tuple(dict.fromkeys(part_of.values())), num_layers, tied)


def mixtral(num_layers: int = 4, num_experts: int = 8) -> ModelStructure:
    """Return a model with fused experts, each a part."""
    fused = {f"model.layers.{n}.mlp.experts.{w}": layer_part(n) for n in range(num_layers) for w in ("up", "down")}
    whole = llama(num_layers, extra=fused)
    shapes = {name: (num_experts, 4, 4) if name in fused else (4,) for name in whole.part_of}
    return split_experts(whole, shapes)


TOWER_INSIDE = ("attn.qkv.weight", "mlp.fc1.weight", "norm1.weight")
VISUAL = {
    "model.visual.patch_embed.proj.weight": "visual.patch_embed.proj",
    **{
        f"model.visual.blocks.{number}.{tail}": f"visual.blocks.{number}"
        for number in range(4)
        for tail in TOWER_INSIDE
    },
    "model.visual.merger.ln_q.weight": "visual.merger.ln_q",
    "model.visual.merger.mlp.0.weight": "visual.merger.mlp.0",
    "model.visual.merger.mlp.2.weight": "visual.merger.mlp.2",
}


def qwen_vl(num_layers: int = 4, *, known: bool = True) -> ModelStructure:
    """Return a text model with a vision tower of 4 layers and a projector; `known`: mergekit has told what is what."""
    plain = llama(num_layers, extra=VISUAL)
    towers = [part for part in plain.parts if part.startswith("visual.")]
    modules = {
        "text_decoder": tuple(part for part in plain.parts if part not in towers),
        "multi_modal_projector": tuple(part for part in towers if part.startswith("visual.merger")),
        "vision_tower": tuple(part for part in towers if not part.startswith("visual.merger")),
    }
    return ModelStructure(plain.part_of, plain.parts, num_layers, tied=False, modules=modules if known else {})


def full(step: int) -> RunCheckpoint:
    return RunCheckpoint(Path(f"/w/run/checkpoint-{step}"), step, None)


def params_of(structure: ModelStructure) -> set[str]:
    """Return the names that training knows: all but the tied one."""
    names = {name for name in structure.part_of if not (structure.tied and name == HEAD_NAME)}
    return set(map(structure.stored_in, names))


def read(text: str, **environ: str) -> Recipe:
    """Parse the text as recipe.yaml in /w."""
    return parse_recipe(text, name="recipe.yaml", folder=Path("/w"), environ={"HOME": "/home/me", **environ})


def problems_of(read: Callable[[], object]) -> list[Problem]:
    """Return what is refused, each with a place and a fix; nothing is an empty list."""
    try:
        read()
    except RecipeError as error:
        assert all(problem.where and problem.what and problem.fix for problem in error.problems)
        return list(error.problems)
    return []


def check(found: Sequence[Problem], *expected: tuple[str, str, str]) -> None:
    """Compare problems with (where, text in what, text in fix); places may leave out ``recipe.yaml``."""
    assert [problem.where.removeprefix("recipe.yaml") for problem in found] == [where for where, _, _ in expected], (
        found
    )
    for problem, (_, what, fix) in zip(found, expected, strict=True):
        assert what in problem.what and fix in problem.fix, problem
