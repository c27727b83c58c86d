"""The saver that ``llmtailor run`` adds to every Trainer of a script.

transformers has no entry points and no option that names a callback, and ``report_to`` knows only its own names. It has
the list ``transformers.trainer.DEFAULT_CALLBACKS``: every Trainer gets one of each class in it.
"""

from __future__ import annotations

import sys

from transformers import TrainerControl, TrainerState, TrainingArguments

from llmtailor.saving.trainer_callback import PartialSaving


class LaunchedSaving(PartialSaving):
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
        if state.is_world_process_zero and self.saver is not None:
            how = self.save_steps or (
                "auto" if self.overhead is not None else f"by save_strategy={args.save_strategy.value}"
            )
            what = f"llmtailor: saving parts ({self.policy.name}, save_steps: {how}) in {self.saver.folder.partial}"
            print(what, file=sys.stderr)  # the launcher's word that it works: scripts rarely show the log at level INFO
