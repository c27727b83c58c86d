"""Parts from names alone, when these do not tell, and what hints change then."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtailor.model.find_parts import find_parts_by_name
from llmtailor.model.parts import ModelStructure
from llmtailor.model.roles import ArchHints, undecided

INSIDE = ("self_attn.q_proj.weight", "mlp.up_proj.weight", "input_layernorm.weight")


def layers(stack: str, count: int = 2, inside: tuple[str, ...] = INSIDE) -> list[str]:
    return [f"{stack}.{number}.{tail}" for number in range(count) for tail in inside]


def structure(
    names: list[str], tied: dict[str, str] | None = None, big: str = "", hints: ArchHints | None = None
) -> ModelStructure:
    """Dissect `names`; those that begin with `big` have a thousand elements, the others one."""
    numels = {name: 1000 if big and name.startswith(big) else 1 for name in names}
    return find_parts_by_name(names, tied or {}, numels, hints)


@pytest.mark.parametrize(
    ("stack", "embed", "norm", "head"),
    [
        ("model.layers", "model.embed_tokens", "model.norm", "lm_head"),  # Llama, Qwen, Mistral, Gemma
        ("transformer.h", "transformer.wte", "transformer.ln_f", "lm_head"),  # GPT-2
        ("transformer.h", "transformer.word_embeddings", "transformer.ln_f", "lm_head"),  # Falcon, Bloom
        ("gpt_neox.layers", "gpt_neox.embed_in", "gpt_neox.final_layer_norm", "embed_out"),
        ("model.layers", "model.embed_tokens", "model.final_layernorm", "lm_head"),  # Phi
        ("model.decoder.layers", "model.decoder.embed_tokens", "model.decoder.final_layer_norm", "lm_head"),  # OPT
        ("backbone.layers", "backbone.embeddings", "backbone.norm_f", "lm_head"),  # Mamba
        ("layers", "tok_embeddings", "norm", "output"),  # Meta's own Llama
        ("transformer.encoder.layers", "transformer.embedding.word_embeddings",
         "transformer.encoder.final_layernorm", "transformer.output_layer"),  # ChatGLM
        ("model.language_model.layers", "model.language_model.embed_tokens", "model.language_model.norm", "lm_head"),
        ("base_model.model.model.layers", "base_model.model.model.embed_tokens", "base_model.model.model.norm",
         "base_model.model.lm_head"),  # PEFT
        ("module._orig_mod.model.layers", "module._orig_mod.model.embed_tokens", "module._orig_mod.model.norm",
         "module._orig_mod.lm_head"),  # DDP around torch.compile
    ],
)  # fmt: skip
def test_the_well_known_parts(stack: str, embed: str, norm: str, head: str) -> None:
    names = [f"{embed}.weight", *layers(stack), f"{norm}.weight", f"{norm}.bias", f"{head}.weight"]
    found = structure(names)
    assert found.parts == ("embed_tokens", "layer 0", "layer 1", "norm", "lm_head")
    assert found.num_layers == 2
    assert not found.tied
    assert found.names("embed_tokens") == [f"{embed}.weight"]
    assert found.names("layer 1") == [f"{stack}.1.{tail}" for tail in INSIDE]
    assert found.names("norm") == [f"{norm}.weight", f"{norm}.bias"]
    assert found.names("lm_head") == [f"{head}.weight"]


def test_parts_stand_in_model_order_however_the_names_come() -> None:
    names = ["wpe.weight", "lm_head.weight", "norm.weight", *reversed(layers("layers", 12)), "embed_tokens.weight"]
    expected = ["embed_tokens", *(f"layer {number}" for number in range(12)), "norm", "lm_head", "wpe"]
    assert list(structure(names).parts) == expected


@pytest.mark.parametrize(
    ("main", "other"),
    [
        ("model.language_model.layers", "model.visual.blocks"),
        ("language_model.model.layers", "vision_tower.vision_model.encoder.layers"),
        ("model.layers", "mtp.layers"),
        ("decoder.block", "encoder.block"),
        ("model.decoder.layers", "model.encoder.layers"),
        ("thinker.model.layers", "thinker.audio_tower.layers"),
        ("thinker.model.layers", "talker.model.layers"),
    ],
)
def test_the_text_decoder_is_the_main_stack_even_when_it_is_smaller(main: str, other: str) -> None:
    found = structure([*layers(other, 3), *layers(main, 2)], big=other)
    assert found.num_layers == 2
    assert found.part_of[f"{main}.1.{INSIDE[0]}"] == "layer 1"
    extra = [part for part in found.parts if not part.startswith("layer ")]
    assert len(extra) == 3
    assert all(part.endswith(f".{number}") for number, part in enumerate(extra))


def test_of_equal_kinds_the_stack_with_most_elements_is_the_main_one() -> None:
    names = [*layers("small.layers", 4), *layers("large.layers", 2)]
    assert structure(names, big="large").num_layers == 2
    assert structure(names, big="small").num_layers == 4


EMBED, HEAD, OF_MTP = "model.embed_tokens.weight", "lm_head.weight", "mtp.embed_tokens.weight"
SIDES = {f"{side}.embed_tokens.weight": "shared.weight" for side in ("encoder", "decoder")}
EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.3.up_proj.weight", "block_sparse_moe.experts.0.w1.weight")
PEFT = "base_model.model."


@pytest.mark.parametrize(
    ("stack", "tied", "expected", "is_tied"),
    [
        # by their short module path, as long as it is unambiguous, and never like a selector
        *(("transformer.h", {}, {name: part}, False) for name, part in (
            ("transformer.wpe.weight", "wpe"), ("model.visual.merger.mlp.0.weight", "visual.merger.mlp.0"),
            ("transformer.visual.patch_embed.proj.weight", "visual.patch_embed.proj"), ("score.weight", "score"),
            ("model.image_newline", "image_newline"), ("scale", "scale"),
            ("transformer.word_embeddings_layernorm.weight", "word_embeddings_layernorm"))),
        ("a.b.layers", {}, {"a.b.proj.weight": "a.b.proj", "a.proj.weight": "a.proj"}, False),
        *(("model.blocks", {}, {f"model.{name}.weight": f"model.{name}.weight"}, False)
          for name in ("layers", "even", "odd", "all", "first")),
        ("a.b.layers", {}, {"a.b.even.weight": "a.b.even"}, False),
        # embeddings are one part whichever name is stored or listed, with the bias of the tied head
        ("model.layers", {HEAD: EMBED}, {EMBED: "embed_tokens", "lm_head.bias": "embed_tokens"}, True),
        ("model.layers", {EMBED: HEAD}, {HEAD: "embed_tokens", EMBED: "embed_tokens"}, True),
        ("model.layers", {OF_MTP: EMBED}, {EMBED: "embed_tokens", HEAD: "lm_head", OF_MTP: "embed_tokens"}, False),
        ("layers", {HEAD: "x.weight", "x.weight": "embed_tokens.weight"},
         {"embed_tokens.weight": "embed_tokens", HEAD: "embed_tokens"}, True),
        # T5: encoder and decoder have embeddings of their own by name, but the values are the shared ones
        ("decoder.block", SIDES, {"shared.weight": "embed_tokens", **dict.fromkeys(SIDES, "embed_tokens")}, False),
        ("decoder.block", SIDES | {HEAD: "shared.weight"}, {"shared.weight": "embed_tokens"}, True),
        # those beside the stack; the same of the norm
        ("model.layers", {}, {"other.embed_tokens.weight": "other.embed_tokens", EMBED: "embed_tokens"}, False),
        ("transformer.h", {}, {"transformer.ln_f.weight": "norm", "transformer.visual.norm.weight": "visual.norm",
                               "norm.weight": "norm.weight"}, False),
        # an encoder is the main stack when there is no other
        ("bert.encoder.layer", {}, {"bert.embeddings.word_embeddings.weight": "embed_tokens",
                                    "classifier.0.weight": "classifier.0"}, False),
        # experts belong to their layer, whatever they are called on disk; what PEFT adds to the module that it adapts
        ("model.layers", {}, {f"model.layers.0.{name}": "layer 0" for name in EXPERTS}, False),
        (f"{PEFT}model.layers", {}, {
            f"{PEFT}model.layers.0.self_attn.q_proj.lora_A.default.weight": "layer 0",
            f"{PEFT}model.embed_tokens.lora_embedding_A.default": "embed_tokens",
            f"{PEFT}model.embed_tokens.base_layer.weight": "embed_tokens",
            f"{PEFT}lm_head.original_module.weight": "lm_head",
            f"{PEFT}lm_head.modules_to_save.default.weight": "lm_head"}, False),
    ],
)  # fmt: skip
def test_what_belongs_where(stack: str, tied: dict[str, str], expected: dict[str, str], is_tied: bool) -> None:
    found = structure([*layers(stack), *(name for name in expected if name not in tied)], tied)
    assert {name: found.part_of[name] for name in expected} == expected
    assert (found.num_layers, found.tied) == (2, is_tied)


@pytest.mark.parametrize(
    ("names", "tied", "num_layers", "parts"),
    [
        (["model.layers.0.mlp.up.weight", "model.layers.4.mlp.up.weight"], {}, 5, ("layer 0", "layer 4")),  # a gap
        (layers("layers", 1), {f"layers.1.{tail}": f"layers.0.{tail}" for tail in INSIDE}, 2, ("layer 0",)),
        (["embed_tokens.weight", "proj.weight", "lm_head.weight"], {}, 0, ("embed_tokens", "lm_head", "proj")),
        ([f"model.layers.{'9' * 5000}.mlp.up.weight"], {}, 0, None),  # longer than any model: a name
        ([], {}, 0, ()),
        # a circle of ties ends at all
        (layers("layers"), {HEAD: "x.weight", "x.weight": HEAD}, 2, None),
    ],
)
def test_how_many_layers(
    names: list[str], tied: dict[str, str], num_layers: int, parts: tuple[str, ...] | None
) -> None:
    found = structure(names, tied)
    assert found.num_layers == num_layers and parts in (None, found.parts)


def test_two_spellings_of_a_model_are_the_same_parts() -> None:
    inside = [("embed_tokens.weight", "embed_tokens"), (f"layers.1.{INSIDE[0]}", "layer 1"), ("norm.weight", "norm")]
    for memory, disk in [("model.language_model.", "language_model.model."), ("model.language_model.", "model.")]:
        heads = ["lm_head.weight", "language_model.lm_head.weight"]
        towers = [f"{prefix}visual.blocks.0.{INSIDE[0]}" for prefix in ("model.", "")]
        names = [prefix + name for prefix in (memory, disk) for name, _ in inside]
        found = structure([*names, *heads, *towers])
        for name, part in inside:
            assert found.part_of[memory + name] == found.part_of[disk + name] == part
        assert {found.part_of[name] for name in heads} == {"lm_head"}
        assert {found.part_of[name] for name in towers} == {"visual.blocks.0"}


# --- hints -----------------------------------------------------------------------------------------------------------

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
    assert undecided(structure(names, tied)) is expected


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
    found = structure(names, tied, hints=hints)
    assert list(found.parts) == parts
    assert found.tied == ("a.out.weight" in tied)
    assert {part: found.names(part) for part in expected} == expected


def test_what_hints_name_but_the_model_lacks_is_found_by_words() -> None:
    hints = ArchHints("decoder.blocks", embed=("tok.weight",), norm=("end.weight",), head=("out.weight",))
    assert structure(LLAMA, hints=hints).part_of == structure(LLAMA).part_of


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
    found = structure([*LLAMA, *tower, *merger, "model.visual.odd.weight"], hints=hints)
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
