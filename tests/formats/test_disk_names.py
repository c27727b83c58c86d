"""What params are called on disk: held against what this version of transformers itself would write."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
loading = pytest.importorskip("transformers.core_model_loading", reason="transformers 4 saves names as they are")

from llmtailor.model.mergekit_data import FAMILIES, UNCHANGED, naming_of, on_disk  # noqa: E402
from llmtailor.model.parts import Param  # noqa: E402

SIZES = {"num_hidden_layers": 2, "n_layer": 2, "num_layers": 2, "num_experts": 3, "num_local_experts": 3}


@pytest.mark.parametrize("model_type", sorted(UNCHANGED | FAMILIES.keys()))
def test_names_and_shapes_are_those_that_transformers_writes(model_type):
    defaults = transformers.AutoConfig.for_model(model_type)
    config = transformers.AutoConfig.for_model(
        model_type, **{name: size for name, size in SIZES.items() if hasattr(defaults, name)}
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    state = model.state_dict()
    written = {name: tuple(tensor.shape) for name, tensor in loading.revert_weight_conversion(model, state).items()}
    naming = naming_of(model_type)
    ours = [piece for name, tensor in state.items() for piece in on_disk(Param(name, tuple(tensor.shape), ""), naming)]
    assert {piece.name: piece.shape for piece in ours} == written
    assert len(ours) == len(written)
