"""What params are called on disk: held against what transformers and PEFT themselves would write."""

from __future__ import annotations

import pytest
from peft import IA3Config, LoraConfig, PromptTuningConfig, get_peft_model, get_peft_model_state_dict

from llmtailor.formats.safetensors_weights import adapter_naming
from llmtailor.model.mergekit_data import FAMILIES, UNCHANGED, naming_of, on_disk
from llmtailor.model.parts import Param
from trainings.models import build

# --- transformers -----------------------------------------------------------------------------------------------------

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
loading = pytest.importorskip("transformers.core_model_loading", reason="transformers 4 saves names as they are")


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


# --- PEFT -------------------------------------------------------------------------------------------------------------

pytest.importorskip("torch")
pytest.importorskip("peft")


TARGETS = {"target_modules": ["q_proj", "v_proj", "up_proj"]}
CONFIGS = {
    "lora": LoraConfig(**TARGETS),
    "dora": LoraConfig(**TARGETS, use_dora=True),
    "whole modules": LoraConfig(**TARGETS, modules_to_save=["lm_head", "input_layernorm"]),
    "embeddings": LoraConfig(target_modules=["embed_tokens", "q_proj"]),
    "tokens": LoraConfig(**TARGETS, trainable_token_indices=[1, 2]),
    "biases": LoraConfig(**TARGETS, bias="all"),
    "ia3": IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_trained_params_are_saved_by_these_names(name):
    model = get_peft_model(build("qwen2", 2, tied=False), CONFIGS[name])
    written = {key: tuple(tensor.shape) for key, tensor in get_peft_model_state_dict(model).items()}
    trained = {key: tuple(param.shape) for key, param in model.named_parameters() if param.requires_grad}
    ours = [
        disk
        for key, shape in trained.items()
        for disk in on_disk(Param(key, shape, "trainable"), adapter_naming("default"))
    ]
    assert {disk.name: disk.shape for disk in ours}.items() <= written.items()
    assert len({disk.name for disk in ours}) == len(trained)
    if name != "embeddings":  # the frozen layer below is saved, too
        assert len(ours) == len(written)


def test_prompts_go_by_another_rule():
    model = get_peft_model(
        build("llama", 2, tied=False), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    )
    trained = [key for key, param in model.named_parameters() if param.requires_grad]
    ours = {disk.name for key in trained for disk in on_disk(Param(key, (1,), "trainable"), adapter_naming("default"))}
    assert not ours & get_peft_model_state_dict(model).keys()
