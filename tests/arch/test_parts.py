"""Parts from names alone: tables of name shapes, and properties that hold for any names."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
    ("stored", "alias"),
    [("model.embed_tokens.weight", "lm_head.weight"), ("lm_head.weight", "model.embed_tokens.weight")],
)
@pytest.mark.parametrize("alias_is_listed", [True, False])
def test_tied_embeddings_are_one_part_whichever_name_is_stored(stored: str, alias: str, alias_is_listed: bool) -> None:
    names = [stored, *layers("model.layers"), "model.norm.weight", *([alias] if alias_is_listed else [])]
    found = structure(names, {alias: stored})
    assert found.tied
    assert found.parts == ("embed_tokens", "layer 0", "layer 1", "norm")
    assert found.part_of[stored] == found.part_of[alias] == "embed_tokens"


def test_a_bias_of_the_tied_head_goes_with_the_embeddings() -> None:
    names = ["model.embed_tokens.weight", *layers("model.layers"), "lm_head.bias"]
    found = structure(names, {"lm_head.weight": "model.embed_tokens.weight"})
    assert found.part_of["lm_head.bias"] == "embed_tokens"
    assert "lm_head" not in found.parts


def test_ties_of_other_tensors_do_not_tie_the_embeddings() -> None:
    names = ["model.embed_tokens.weight", *layers("model.layers"), "lm_head.weight", "mtp.embed_tokens.weight"]
    found = structure(names, {"mtp.embed_tokens.weight": "model.embed_tokens.weight"})
    assert not found.tied
    assert found.part_of["mtp.embed_tokens.weight"] == "embed_tokens"
    assert found.part_of["lm_head.weight"] == "lm_head"


def test_a_chain_of_ties_ends_at_the_stored_name_and_a_circle_ends_at_all() -> None:
    names = ["embed_tokens.weight", *layers("layers")]
    chain = {"lm_head.weight": "other.weight", "other.weight": "embed_tokens.weight"}
    assert structure(names, chain).part_of["lm_head.weight"] == "embed_tokens"
    circle = {"lm_head.weight": "other.weight", "other.weight": "lm_head.weight"}
    assert "lm_head.weight" in structure(names, circle).part_of


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


def test_an_encoder_is_the_main_stack_when_there_is_no_other() -> None:
    names = ["bert.embeddings.word_embeddings.weight", *layers("bert.encoder.layer", 3), "classifier.0.weight"]
    found = structure(names)
    assert found.num_layers == 3
    assert found.part_of["bert.embeddings.word_embeddings.weight"] == "embed_tokens"
    assert found.part_of["classifier.0.weight"] == "classifier.0"


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("transformer.wpe.weight", "wpe"),
        ("transformer.visual.patch_embed.proj.weight", "visual.patch_embed.proj"),
        ("model.visual.merger.mlp.0.weight", "visual.merger.mlp.0"),
        ("model.image_newline", "image_newline"),
        ("score.weight", "score"),
        ("transformer.word_embeddings_layernorm.weight", "word_embeddings_layernorm"),
        ("scale", "scale"),
    ],
)
def test_other_parts_go_by_their_short_module_path(name: str, part: str) -> None:
    found = structure([*layers("transformer.h"), name])
    assert found.part_of[name] == part
    assert found.parts[-1] == part


def test_short_paths_stay_unambiguous() -> None:
    found = structure([*layers("a.b.layers"), "a.b.proj.weight", "a.proj.weight"])
    assert found.part_of["a.b.proj.weight"] == "a.b.proj"
    assert found.part_of["a.proj.weight"] == "a.proj"


@pytest.mark.parametrize("name", ["layers", "even", "odd", "all", "first"])
def test_no_part_is_called_like_a_selector(name: str) -> None:
    found = structure([*layers("model.blocks"), f"model.{name}.weight"])
    assert name not in found.parts
    assert found.part_of[f"model.{name}.weight"] == f"model.{name}.weight"


def test_a_module_called_like_a_selector_keeps_more_of_its_path_if_it_has_one() -> None:
    assert structure([*layers("a.b.layers"), "a.b.even.weight"]).part_of["a.b.even.weight"] == "a.b.even"


def test_the_embeddings_beside_the_stack_are_the_ones() -> None:
    found = structure(["other.embed_tokens.weight", "model.embed_tokens.weight", *layers("model.layers")])
    assert found.names("embed_tokens") == ["model.embed_tokens.weight"]
    assert found.part_of["other.embed_tokens.weight"] == "other.embed_tokens"


def test_the_embeddings_are_the_module_that_holds_the_values() -> None:
    """T5: encoder and decoder have embeddings of their own by name, but the values are the shared ones."""
    tied = {f"{side}.embed_tokens.weight": "shared.weight" for side in ("encoder", "decoder")}
    found = structure(["shared.weight", *layers("encoder.block"), *layers("decoder.block")], tied)
    assert found.names("embed_tokens") == ["shared.weight", *tied]
    assert not found.tied
    assert structure(["shared.weight", *layers("decoder.block")], tied | {"lm_head.weight": "shared.weight"}).tied


def test_a_norm_elsewhere_is_not_the_final_norm() -> None:
    names = [*layers("transformer.h"), "transformer.ln_f.weight", "transformer.visual.norm.weight", "norm.weight"]
    found = structure(names)
    assert found.names("norm") == ["transformer.ln_f.weight"]
    assert found.part_of["transformer.visual.norm.weight"] == "visual.norm"


def test_expert_weights_belong_to_their_layer_whatever_they_are_called_on_disk() -> None:
    fused = "model.layers.0.mlp.experts.gate_up_proj"
    on_disk = ["model.layers.0.mlp.experts.3.up_proj.weight", "model.layers.0.block_sparse_moe.experts.0.w1.weight"]
    found = structure([*layers("model.layers"), fused, *on_disk])
    assert {found.part_of[name] for name in [fused, *on_disk]} == {"layer 0"}
    assert found.num_layers == 2


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


def test_peft_tensors_belong_to_the_module_they_adapt() -> None:
    root = "base_model.model."
    names = {
        f"{root}model.layers.0.self_attn.q_proj.base_layer.weight": "layer 0",
        f"{root}model.layers.0.self_attn.q_proj.lora_A.default.weight": "layer 0",
        f"{root}model.embed_tokens.lora_embedding_A.default": "embed_tokens",
        f"{root}model.embed_tokens.base_layer.weight": "embed_tokens",
        f"{root}lm_head.original_module.weight": "lm_head",
        f"{root}lm_head.modules_to_save.default.weight": "lm_head",
    }
    assert structure(list(names)).part_of == names


def test_a_gap_in_the_numbers_counts_up_to_the_last_layer() -> None:
    found = structure(["model.layers.0.mlp.up.weight", "model.layers.4.mlp.up.weight"])
    assert found.num_layers == 5
    assert found.parts == ("layer 0", "layer 4")


def test_layers_that_are_tied_as_a_whole_still_count() -> None:
    tied = {f"layers.1.{tail}": f"layers.0.{tail}" for tail in INSIDE}
    found = structure(layers("layers", 1), tied)
    assert found.num_layers == 2
    assert found.parts == ("layer 0",)
    assert found.part_of[f"layers.1.{INSIDE[0]}"] == "layer 0"


def test_a_model_without_numbers_has_no_layers() -> None:
    found = structure(["embed_tokens.weight", "proj.weight", "lm_head.weight"])
    assert found.num_layers == 0
    assert found.parts == ("embed_tokens", "lm_head", "proj")
    assert structure([]).parts == ()


def test_a_number_longer_than_any_model_is_a_name() -> None:
    assert structure([f"model.layers.{'9' * 5000}.mlp.up.weight"]).num_layers == 0


word = st.sampled_from(
    [
        "model",
        "layers",
        "h",
        "visual",
        "encoder",
        "norm",
        "lm_head",
        "embed_tokens",
        "wte",
        "0",
        "1",
        "7",
        "lora_A",
        "x",
    ]
)
tensor_name = st.lists(word, min_size=1, max_size=6).map(".".join)


@given(st.lists(tensor_name, unique=True, max_size=25), st.data())
def test_every_name_has_one_part_and_every_part_a_name(names: list[str], data: st.DataObject) -> None:
    tied = {}
    if names:
        tied = data.draw(st.dictionaries(tensor_name, st.sampled_from(names), max_size=4))
    found = find_parts_by_name(names, tied, {})
    assert found.part_of.keys() == {*names, *tied}
    assert set(found.parts) == set(found.part_of.values())
    assert len(found.parts) == len(set(found.parts))
    for name, target in tied.items():
        assert found.part_of[name] == found.part_of[target]
    assert all(int(part[6:]) < found.num_layers for part in found.parts if part.startswith("layer "))
    assert not (found.tied and "lm_head" in found.parts)
    assert find_parts_by_name(names, tied, {}) == found
