"""What trainings and we write is known, and nothing else: held against the installed transformers and PEFT."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from helpers.checkpoints import make
from llmtailor.frameworks.files import is_tokenizer_file
from llmtailor.frameworks.framework import survey_contents


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make(tmp_path, 100)


def unknown(folder: Path) -> list[str]:
    return list(survey_contents(folder).unknown)


def test_all_names_of_the_installed_tokenizers_are_known(checkpoint: Path) -> None:
    transformers = pytest.importorskip("transformers")
    names = {"special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "preprocessor_config.json"}
    for path in Path(transformers.__file__).parent.glob("models/*/tokenization_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Assign) and "FILES_NAMES" in ast.unparse(node.targets[0]):
                assert isinstance(node.value, ast.Dict)
                names |= {value.value for value in node.value.values if isinstance(value, ast.Constant)}
    assert len(names) > 20
    assert [name for name in names if not is_tokenizer_file(name)] == ["preprocessor_config.json"]
    for name in names:
        (checkpoint / name).write_text("{}")
    assert unknown(checkpoint) == []


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What PEFT saves, with a second adapter in a folder of its own."""
    peft = pytest.importorskip("peft")
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 11, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2))
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    model.add_adapter("other", peft.LoraConfig(target_modules=["v_proj"]))
    folder = tmp_path_factory.mktemp("adapter")
    model.save_pretrained(folder)
    assert (folder / "README.md").exists() and (folder / "other" / "adapter_model.safetensors").exists()
    return folder


def test_what_peft_saves_is_known(adapter: Path) -> None:
    assert unknown(adapter) == []


@pytest.mark.parametrize(
    "edit",
    [
        lambda text: text + "\nIt was trained on our own data.\n",
        lambda text: text.replace("Model ID", "the best so far"),
        lambda text: text.replace("library_name: peft", "library_name: peft\nlicense: mit"),
        lambda text: text.replace("[More Information Needed]", "Jane", 1),
        lambda text: "# Notes\n" + text,
        lambda text: "",
        lambda text: "---\n",
    ],
)
def test_a_card_of_peft_that_was_edited_is_unknown(adapter: Path, edit) -> None:
    card = (adapter / "README.md").read_text()
    changed = edit(card)
    assert changed != card
    (adapter / "README.md").write_text(changed)
    try:
        assert unknown(adapter) == ["README.md"]
    finally:
        (adapter / "README.md").write_text(card)


def test_weights_beside_other_weights_are_unknown(checkpoint: Path) -> None:
    others = ["pytorch_model.bin", "model-ema.safetensors", "adapter_model.bin", "adapter_model.safetensors"]
    others += ["model.safetensors.index.json", "model-00001-of-00002.safetensors"]
    for name in others:
        (checkpoint / name).write_text("{}")
    assert unknown(checkpoint) == sorted(others)


def test_weights_in_other_forms_are_known_where_they_are_the_only_ones(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    shards = [f"pytorch_model-0000{number}-of-00002.bin" for number in (1, 2)]
    for name in (*shards, "pytorch_model.bin.index.json"):
        (checkpoint / name).write_text("{}")
    assert unknown(checkpoint) == []
    (checkpoint / "model-00001-of-00001.safetensors").write_text("")
    assert unknown(checkpoint) == sorted([*shards, "pytorch_model.bin.index.json"])


def test_shards_of_weights_are_those_of_the_index(tmp_path: Path) -> None:
    checkpoint = make(tmp_path, 100, shard_bytes=2000)
    assert (checkpoint / "model.safetensors.index.json").exists()
    assert unknown(checkpoint) == []
    (checkpoint / "model-00001-of-00099.safetensors").write_text("")
    assert unknown(checkpoint) == ["model-00001-of-00099.safetensors"]
    (checkpoint / "model.safetensors.index.json").write_text("damaged")
    assert unknown(checkpoint) == [], "their names are the Trainer's, and nothing says otherwise"


def test_code_is_known_if_the_model_consists_of_it(checkpoint: Path) -> None:
    (checkpoint / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["me/x--token_x.X", null]}}')
    for name in ("token_x.py", "train.py", "zero_to_torch.py"):
        (checkpoint / name).write_text("")
    assert unknown(checkpoint) == ["train.py"]


def test_only_the_folder_of_the_tag_is_known(checkpoint: Path) -> None:
    (checkpoint / "global_step90").mkdir()
    (checkpoint / "global_step100" / "inner").mkdir()
    (checkpoint / "global_step100" / "zero_pp_rank_7_mp_rank_00_model_states.pt").symlink_to("/")
    inner = ["global_step100/inner/", "global_step100/zero_pp_rank_7_mp_rank_00_model_states.pt"]
    assert unknown(checkpoint) == [*inner, "global_step90/"]
    (checkpoint / "latest").unlink()
    assert unknown(checkpoint) == ["global_step100/", "global_step90/"], "which is the checkpoint's own is not told"


def test_nothing_is_opened_that_would_hang(checkpoint: Path) -> None:
    import os

    for name in ("README.md", "config.json", "latest"):
        (checkpoint / name).unlink(missing_ok=True)
        os.mkfifo(checkpoint / name)
    assert unknown(checkpoint) == ["README.md", "config.json", "latest"]
