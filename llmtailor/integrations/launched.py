"""The saver that ``llmtailor run`` adds to every Trainer of a script.

transformers has no entry points and no option that names a callback. It has the list
``transformers.trainer.DEFAULT_CALLBACKS``: every Trainer gets one of each class in it. The option ``report_to`` knows
the names in a dict, to which the module `report_to` adds ours.
"""

from __future__ import annotations

from transformers import TrainerControl, TrainerState, TrainingArguments

from llmtailor.integrations.report_to import NamedSaving
from llmtailor.saving.callbacks import PartialSaving


class LaunchedSaving(NamedSaving):
    """A saver with the options of the environment. It gives way to one that the script adds itself."""

    gives_way = True

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        handler = self.trainer.callback_handler
        if any(isinstance(one, PartialSaving) and not one.gives_way for one in handler.callbacks):
            # a new list: the Trainer is iterating over this one
            handler.callbacks = [one for one in handler.callbacks if one is not self]
            return
        super().on_train_begin(args, state, control, **kwargs)
