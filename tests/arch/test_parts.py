"""Parts from names alone: tables of name shapes."""

from __future__ import annotations

import pytest

from llmtailor.model.find_parts import find_parts_by_name
from llmtailor.model.parts import ModelStructure

INSIDE = ("self_attn.q_proj.weight", "mlp.up_proj.weight", "input_layernorm.weight")


def layers(stack: str, count: int = 2, inside: tuple[str, ...] = INSIDE) -> list[str]:
    return [f"{stack}.{number}.{tail}" for number in range(count) for tail in inside]


def structure(names: list[str], tied: dict[str, str] | None = None, big: str = "") -> ModelStructure:
    """Dissect `names`; those that begin with `big` have a thousand elements, the others one."""
    return find_parts_by_name(names, tied or {}, {name: 1000 if big and name.startswith(big) else 1 for name in names})


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
