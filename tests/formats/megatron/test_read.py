"""What a checkpoint of Megatron-core says of its params."""

from __future__ import annotations

from llmtailor.formats.megatron.read import assign, identity_of


def test_a_group_with_a_learning_rate_of_its_own_has_the_embedding_and_the_head():
    """As with ``--decoupled-lr``."""
    ends = ["embedding.word_embeddings.weight", "output_layer.weight"]
    shapes = dict.fromkeys([*ends, "decoder.layers.mlp.linear_fc2.weight"], (8, 4)) | {
        "decoder.final_layernorm.weight": (4,)
    }
    groups = [{"wd_mult": 1.0}, {"wd_mult": 0.0}, {"wd_mult": 1.0, "is_decoupled_lr": True}]
    assert [*assign(shapes, [*map(identity_of, groups)], "x").values()] == [2, 2, 0, 1]
