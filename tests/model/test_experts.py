"""How experts become parts, and how they are named in selectors and messages."""

from __future__ import annotations

import pytest

from llmtailor.model.find_parts import find_parts_by_name, split_experts
from llmtailor.model.parts import ExpertSlice, Part, condense, group_shares, layer_part, step_of, with_layers
from llmtailor.recipe.emit import selectors_for
from llmtailor.recipe.selectors import select

E, LAYERS = 4, 4


def fused(disk: str | None = None, dense: int = 0):
    """A model with fused experts in the layers from `dense` on; `disk` is how the file names them."""
    shapes, extra = {"model.embed_tokens.weight": (9, 6)}, []
    for number in range(LAYERS):
        layer = f"model.layers.{number}"
        shapes |= {f"{layer}.self_attn.q_proj.weight": (6, 6), f"{layer}.input_layernorm.weight": (6,)}
        if number < dense:
            shapes[f"{layer}.mlp.up_proj.weight"] = (10, 6)
            continue
        shapes |= {f"{layer}.mlp.gate.weight": (E, 6), f"{layer}.mlp.shared_expert.up_proj.weight": (5, 6)}
        shapes |= {f"{layer}.mlp.experts.gate_up_proj": (E, 10, 6), f"{layer}.mlp.experts.down_proj": (E, 6, 5)}
        if disk == "one by one":
            extra += [f"{layer}.block_sparse_moe.experts.{e}.{w}.weight" for e in range(E) for w in ("w1", "w2", "w3")]
        elif disk == "fused":
            extra += [f"{layer}.block_sparse_moe.input_linear.weight"]
    shapes |= {"model.norm.weight": (6,), "lm_head.weight": (9, 6)}
    return find_parts_by_name([*shapes, *extra], {}, {}), shapes


@pytest.mark.parametrize("disk", [None, "one by one"])
def test_fused_experts_are_pieces_of_params(disk):
    structure, shapes = fused(disk, dense=1)
    found = split_experts(structure, shapes)
    shares = [f"layer {n} {share}" for n in (1, 2, 3) for share in ("non-expert", *(f"expert {e}" for e in range(E)))]
    assert found.parts == ("embed_tokens", "layer 0", *shares, "norm", "lm_head")
    names = found.names("layer 2 expert 3")
    pieces = ["model.layers.2.mlp.experts.3.gate_up_proj", "model.layers.2.mlp.experts.3.down_proj"]
    assert names[:2] == pieces and len(names) == (2 if disk is None else 5)
    assert found.pieces[pieces[0]] == ExpertSlice("model.layers.2.mlp.experts.gate_up_proj", 180, 240)
    assert found.pieces[pieces[1]].numel == 30
    assert len(found.names("layer 2 non-expert")) == 4
    assert found.part_of[pieces[0]].layer == 2 and found.num_layers == LAYERS
    for param, of_param in found.pieces_of.items():
        ends = [found.pieces[name].end for name in of_param]
        assert [found.pieces[name].begin for name in of_param] == [0, *ends[:-1]]
        assert ends[-1] == E * shapes[param][1] * shapes[param][2]
    assert found.joined({"layer 1", "layer 2", "layer 3"}) == structure
    one = split_experts(structure, shapes, {"layer 2"})
    assert one.parts == ("embed_tokens", "layer 0", "layer 1", *shares[5:10], "layer 3", "norm", "lm_head")
    assert split_experts(one, shapes) == found == split_experts(found, shapes)


def test_experts_that_go_by_another_name_as_one_tensor_on_disk_stay_with_their_layer():
    structure, shapes = fused("fused")
    assert split_experts(structure, shapes) == structure


def test_experts_with_tensors_of_their_own():
    names = [f"model.layers.{n}.mlp.experts.{e}.{w}.weight" for n in range(2) for e in range(3) for w in ("up", "down")]
    structure = find_parts_by_name([*names, "model.layers.0.mlp.gate.weight", "model.layers.1.mlp.gate.weight"], {}, {})
    found = split_experts(structure, {})
    assert found.names("layer 1 expert 2") == names[-2:] and not found.pieces
    assert found.parts[:2] == ("layer 0 non-expert", "layer 0 expert 0")


@pytest.mark.parametrize(
    "shapes",
    [
        {"m.layers.0.mlp.experts.up": (4, 6)},  # a matrix
        {"m.layers.0.mlp.experts.up": (4, 6, 2), "m.layers.0.mlp.experts.down": (3, 2, 6)},
        {"m.layers.0.mlp.experts.up": (1, 6, 2)},
        {"m.layers.0.mlp.experts.up": (10**12, 1, 1)},
        {"m.layers.0.mlp.up": (4, 6, 2)},
    ],
)
def test_what_is_not_one_piece_per_expert_is_not_split(shapes):
    names = [*shapes, "m.layers.0.norm", "m.layers.1.norm"]
    structure = find_parts_by_name(names, {}, {})
    assert split_experts(structure, {**shapes, "m.layers.0.norm": (6,), "m.layers.1.norm": (6,)}) == structure


def named(*selectors):
    structure, shapes = fused(dense=1)
    found = split_experts(structure, shapes)
    names, problems = select(selectors, found)
    whole, split = found.divide(names)
    return (whole, split) if not problems else problems[0].fix


EVERY = [f"expert {e}" for e in range(E)]


@pytest.mark.parametrize(
    ("selectors", "parts"),
    [
        (["layer 2 expert 3"], ["layer 2 expert 3"]),
        (["layer 2 experts 1-2"], ["layer 2 expert 1", "layer 2 expert 2"]),
        (["layers 1,3 experts 0, 2-3"], [f"layer {n} expert {e}" for n in (1, 3) for e in (0, 2, 3)]),
        (["layer 2 experts"], [f"layer 2 {one}" for one in EVERY]),
        (["expert 3"], [f"layer {n} expert 3" for n in (1, 2, 3)]),
        (["layers 0-2 expert 0"], ["layer 1 expert 0", "layer 2 expert 0"]),
        (["experts"], [f"layer {n} {one}" for n in (1, 2, 3) for one in EVERY]),
        (["3", "!experts"], ["layer 3 non-expert"]),
        (["layer 3 non-expert"], ["layer 3 non-expert"]),
        (["layers 0, 2-3 non-expert"], ["layer 2 non-expert", "layer 3 non-expert"]),
        (["non-expert"], [f"layer {n} non-expert" for n in (1, 2, 3)]),
        (["3", "!non-expert"], [f"layer 3 {one}" for one in EVERY]),
        (["layer 3"], ["layer 3 non-expert", *(f"layer 3 {one}" for one in EVERY)]),
        (["0-1", "!layer 1 experts 1-3"], ["layer 0", "layer 1 non-expert", "layer 1 expert 0"]),
        (["*.1.mlp.experts.2.*"], ["layer 1 expert 2"]),
        (["*.1.mlp.experts.*"], [f"layer 1 {one}" for one in EVERY]),
    ],
)
def test_selectors_of_experts(selectors, parts):
    assert named(*selectors) == (parts, [])
    structure, shapes = fused(dense=1)
    found = split_experts(structure, shapes)
    names, _ = select(selectors, found)
    assert select(selectors_for(names, found), found) == (names, ())


def test_a_fused_param_is_still_named_whole():
    for text in ("*.1.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.gate_up_proj"):
        assert named(text) == ([], [f"layer 1 {one}" for one in EVERY])


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("layer 2 expert 4", "experts are numbered 0-3"),
        ("layer 4 experts", "layers with experts are 1-3"),
        ("layer 0 experts", "layers with experts are 1-3"),
        ("layers 1-4 non-expert", "layers with experts are 1-3"),
        ("experts 2-1", "write 1-2"),
        ("layers 3-2 experts", "write 2-3"),
        ("layer 2 experts 0-1-2", "write numbers and ranges"),
        ("layer 2 experts 0-9999999999999", "name fewer"),
    ],
)
def test_experts_out_of_range(text, fix):
    assert fix in named(text)


def test_a_model_without_experts():
    structure, _ = fused()
    for text in ("experts", "non-expert", "layer 0 non-expert"):
        _, (problem,) = select([text], structure)
        assert "select layers" in problem.fix


def test_experts_in_messages():
    assert condense(["layer 0", "layer 1 non-expert", "layer 1 expert 0", "layer 1 expert 2", "layer 1 expert 1"]) == (
        "layer 0, layer 1 non-expert, layer 1 experts 0-2"
    )
    assert condense([f"layer {n} expert {e}" for n in (1, 3) for e in range(9)]) == "18 experts of layers 1, 3"
    assert condense(["layer 1 non-expert", "layer 2 non-expert"]) == "layers 1-2 non-expert"


@pytest.mark.parametrize("text", ["layers 1-2 non-expert", "layer 2 experts 1-2", "layers 0, 2"])
def test_what_messages_call_parts_is_a_selector(text):
    structure, shapes = fused(dense=1)
    found = split_experts(structure, shapes)
    names, problems = select([text], found)
    parts = found.divide(names)[0]
    assert not problems and condense(parts if "expert" in text else [part.whole for part in parts]) == text
    assert selectors_for(names, found) == ((text,) if "expert" in text else ("even",))


def test_rows_of_experts_are_folded_by_layer_and_then_over_layers():
    few = ["layer 0", *(f"layer {n} expert {e}" for n in (1, 2) for e in range(3))]
    assert group_shares(few, [0, 5, 6, 5, 5, 5, 5]) == [[0], [1, 3], [2], [4, 5, 6]]
    many = [f"layer {n} expert {e}" for n in range(30) for e in range(3)]
    assert [len(group) for group in group_shares(many, [e == 1 for _ in range(30) for e in range(3)])] == [60, 30]


def test_a_layer_is_held_if_every_share_is():
    every = [*map(Part, ("layer 0 non-expert", "layer 0 expert 0", "layer 0 expert 1", "layer 1"))]
    assert with_layers(every, every) == {*every, "layer 0"}
    assert with_layers(every[:2], every) == {*every[:2]}
    assert [part.whole for part in every] == ["layer 0"] * 3 + ["layer 1"]
    assert step_of(dict(zip(every[1:3], (3, 5), strict=True)), layer_part(0), 9) == 3
    assert step_of({layer_part(0): 4}, every[2], 9) == 4
    assert step_of({layer_part(1): 4}, layer_part(0), 9) == 9
