"""What `attach` refuses, before anything is trained."""

from __future__ import annotations

import pytest

from llmtailor.errors import UsageError
from llmtailor.policies.check import NUM_SAVES
from saving.policy_runs import Custom

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, num_hidden_layers=4))
    return Trainer(model, TrainingArguments(str(tmp_path_factory.mktemp("out")), use_cpu=True, report_to=[]))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"policy": "partiy"}, "did you mean 'parity'"),
        ({"policy": "round_robin:4", "max_staleness": 2}, "max_staleness is 2"),
        ({"save_steps": 0}, "save_steps is 0"),
        ({"keep_composable": 0}, "keep_composable: it is 0"),
        ({"keep_composable": 1.5}, "keep_composable: it is 1.5"),
    ],
)
def test_what_makes_no_sense(trainer, options, told):
    from llmtailor.saving import attach

    callbacks = list(trainer.callback_handler.callbacks)
    with pytest.raises(UsageError, match=told):
        attach(trainer, **options)
    assert trainer.callback_handler.callbacks == callbacks


def test_a_policy_is_tested_once(tmp_path):
    """When the saver is attached, and not again when training begins."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, default_data_collator

    from llmtailor.saving import attach
    from trainings.common import Tokens

    asked = []

    def choose(now):
        asked.append(now.save)
        return dict.fromkeys(now.parts, "all")

    sizes = {"vocab_size": 64, "hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, num_hidden_layers=1))
    args = TrainingArguments(
        str(tmp_path / "run"), use_cpu=True, report_to=[], max_steps=3, save_strategy="no", disable_tqdm=True
    )
    trainer = Trainer(model, args, train_dataset=Tokens(64), data_collator=default_data_collator)
    attach(trainer, policy=Custom(choose), save_steps=1, max_staleness=5)
    assert len(asked) == 2 * NUM_SAVES, "once straight, once resumed"
    trainer.train()
    assert asked[2 * NUM_SAVES :] == [1, 2]
