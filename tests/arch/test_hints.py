"""What names alone don't tell: when that is so, and what hints change."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtailor.model.find_parts import find_parts_by_name
from llmtailor.model.parts import ModelStructure
from llmtailor.model.roles import ArchHints, undecided

INSIDE = ("self_attn.q_proj.weight", "mlp.up_proj.weight")


def layers(stack: str, count: int = 2) -> list[str]:
    return [f"{stack}.{number}.{tail}" for number in range(count) for tail in INSIDE]


def structure(names: list[str], hints: ArchHints | None = None, tied: dict[str, str] | None = None) -> ModelStructure:
    return find_parts_by_name(names, tied or {}, dict.fromkeys(names, 1), hints)


LLAMA = ["model.embed_tokens.weight", *layers("model.layers"), "model.norm.weight", "lm_head.weight"]


@pytest.mark.parametrize(
    ("names", "tied", "expected"),
    [
        (LLAMA, {}, False),
        ([*LLAMA, "model.rotary_emb.inv_freq", "score.0.weight"], {}, False),
        (LLAMA[:-1], {"lm_head.weight": "model.embed_tokens.weight"}, False),
        (LLAMA[:-1], {}, True),  # no head
        (LLAMA[1:], {}, True),  # no embeddings
        ([name for name in LLAMA if "norm" not in name], {}, True),
        ([name for name in LLAMA if "layers" not in name], {}, True),
        ([*LLAMA, *layers("model.visual.blocks")], {}, True),
        ([*LLAMA, *layers("other.layers")], {}, True),
    ],
)
def test_when_names_alone_do_not_decide(names: list[str], tied: dict[str, str], expected: bool) -> None:
    assert undecided(structure(names, None, tied)) is expected


WRAPPED = ["model.language_model.tok.weight", "model.language_model.tok.bias"]
SEQUENCE = [f"layers.{at}.{tail}" for at in (1, 2, 3) for tail in INSIDE]


@pytest.mark.parametrize(
    ("names", "hints", "tied", "parts", "expected"),
    [
        # the stack and the roles
        (["a.tok.weight", *layers("a.big", 5), *layers("b.small", 2), "b.end.weight", "out.proj.weight"],
         ArchHints("b.small", embed=("a.tok.weight",), norm=("b.end.weight",), head=("out.proj.weight",)), {},
         ["embed_tokens", "layer 0", "layer 1", "norm", "lm_head", *(f"a.big.{number}" for number in range(5))], {}),
        # compared without wrappers, and for every tensor of the module
        ([*WRAPPED, *layers("model.language_model.layers")], ArchHints("model.layers", embed=("model.tok.weight",)), {},
         ["embed_tokens", "layer 0", "layer 1"], {"embed_tokens": WRAPPED}),
        # tied; and stored elsewhere: one part with what holds them
        (["a.tok.weight", *layers("a.blocks"), "a.out.bias"],
         ArchHints("a.blocks", embed=("a.tok.weight",), head=("a.out.weight",)), {"a.out.weight": "a.tok.weight"},
         ["embed_tokens", "layer 0", "layer 1"], {"embed_tokens": ["a.tok.weight", "a.out.bias", "a.out.weight"]}),
        (["shared.weight", *layers("decoder.block")],
         ArchHints("decoder.block", embed=("decoder.tok.weight",)), {"decoder.tok.weight": "shared.weight"},
         ["embed_tokens", "layer 0", "layer 1"], {"embed_tokens": ["shared.weight", "decoder.tok.weight"]}),
        # Phi-1 is one sequence: embeddings are layers.0, the blocks layers.1 to layers.24, norm and head layers.25
        (["layers.0.wte.weight", *SEQUENCE, "layers.4.ln.weight", "layers.4.linear.weight"],
         ArchHints("layers", ("layers.0.wte.weight",), ("layers.${num_layers}.ln.weight",),
                   ("layers.${num_layers}.linear.weight",)), {},
         ["embed_tokens", "layer 0", "layer 1", "layer 2", "norm", "lm_head"],
         {"layer 0": [f"layers.1.{tail}" for tail in INSIDE], "norm": ["layers.4.ln.weight"]}),
    ],
)  # fmt: skip
def test_what_hints_change(
    names: list[str], hints: ArchHints, tied: dict[str, str], parts: list[str], expected: dict[str, list[str]]
) -> None:
    found = structure(names, hints, tied)
    assert list(found.parts) == parts
    assert found.tied == ("a.out.weight" in tied)
    assert {part: found.names(part) for part in expected} == expected


def test_what_hints_name_but_the_model_lacks_is_found_by_words() -> None:
    hints = ArchHints("decoder.blocks", embed=("tok.weight",), norm=("end.weight",), head=("out.weight",))
    assert structure(LLAMA, hints).part_of == structure(LLAMA).part_of


def test_submodels_are_told_by_part() -> None:
    tower = [*layers("model.visual.blocks"), "model.visual.patch_embed.proj.weight"]
    merger = [
        "model.visual.merger.mlp.0.weight",
        "model.visual.merger.mlp.2.weight",
        "model.visual.merger.extra.weight",
    ]
    hints = ArchHints(
        "model.layers",
        modules={
            "text_decoder": ("model.embed_tokens.weight", "model.layers.${layer_index}.x.weight", "model.norm.weight"),
            "projector": ("visual.merger.mlp.0.weight", "visual.merger.mlp.2.weight"),
            "vision_tower": ("visual.blocks.${layer_index}.x.weight", "visual.patch_embed.proj.weight"),
            "audio_tower": ("audio.layers.${layer_index}.x.weight",),
        },
    )
    found = structure([*LLAMA, *tower, *merger, "model.visual.odd.weight"], hints)
    assert found.modules == {
        "text_decoder": ("embed_tokens", "layer 0", "layer 1", "norm"),
        "projector": ("visual.merger.mlp.0", "visual.merger.mlp.2", "visual.merger.extra"),
        "vision_tower": ("visual.blocks.0", "visual.blocks.1", "visual.patch_embed.proj"),
    }


word = st.sampled_from(["model", "layers", "visual", "norm", "lm_head", "embed_tokens", "wte", "0", "1", "x"])
tensor_name = st.lists(word, min_size=1, max_size=5).map(".".join)
hint_names = st.lists(tensor_name, max_size=3).map(tuple)


@given(
    st.lists(tensor_name, unique=True, max_size=20),
    st.builds(ArchHints, st.none() | tensor_name, hint_names, hint_names, hint_names,
              st.dictionaries(word, hint_names, max_size=2)),
    st.data(),
)  # fmt: skip
def test_whatever_the_hints_every_name_has_one_part(names: list[str], hints: ArchHints, data: st.DataObject) -> None:
    tied = data.draw(st.dictionaries(tensor_name, st.sampled_from(names), max_size=3)) if names else {}
    found = find_parts_by_name(names, tied, {}, hints)
    assert found.part_of.keys() == {*names, *tied}
    assert len(found.parts) == len(set(found.parts))
    assert set(found.parts) == set(found.part_of.values())
    assert all(int(part[6:]) < found.num_layers for part in found.parts if part.startswith("layer "))
    if not hints.head:  # which may name another tensor than lm_head, while there is one of this name
        assert not (found.tied and "lm_head" in found.parts)
    assert all(part in found.parts for owned in found.modules.values() for part in owned)
