"""The callbacks that ``llmtailor run`` and ``llmtailor attest`` add to every Trainer of a script.

transformers has no entry points and no option that names a callback. It has the list
``transformers.trainer.DEFAULT_CALLBACKS``: every Trainer gets one of each class in it. The option ``report_to`` knows
the names in a dict, to which the module `report_to` adds ours.
"""

from __future__ import annotations

import os

from transformers import TrainerCallback

from llmtailor.integrations.attested import announce_or_leave, check_resumed, end, end_with_error, forget, task
from llmtailor.integrations.report_to import NamedSaving
from llmtailor.live.trainer_resume import resumed_from
from llmtailor.saving.arguments import resume_options
from llmtailor.saving.callbacks import AttestResume, PartialSaving, attach_stock, find_trainer
from llmtailor.stock_saving.trainer import StockSaving


class LaunchedSaving(NamedSaving):
    """A saver with the options of the environment. It gives way to one that the script adds itself."""

    gives_way = True
    _say = staticmethod(announce_or_leave)

    def on_train_begin(self, *_: object, **__: object) -> None:
        handler = self.trainer.callback_handler
        if any(isinstance(one, PartialSaving) and not one.gives_way for one in handler.callbacks):
            # a new list: the Trainer is iterating over this one
            handler.callbacks = [one for one in handler.callbacks if one is not self]
            return
        super().on_train_begin()


class LaunchedAttest(AttestResume):
    """Attests with the options of the environment; ends the program before its first step if that is its task.

    It gives way to a saver of the script, which attests as well, unless the program is to be ended: then nothing is
    saved.
    """

    _say = staticmethod(announce_or_leave)

    def __init__(self) -> None:
        self.options = resume_options(os.environ)

    def on_train_begin(self, *_: object, **__: object) -> None:
        forget()
        trainer = find_trainer(self)
        callbacks = trainer.callback_handler.callbacks
        if task().checkpoint is None:
            if not any(isinstance(one, (PartialSaving, AttestResume)) and one is not self for one in callbacks):
                self._begin(trainer)
            return
        # in place, because the Trainer iterates over this list; savers come later in it
        callbacks[:] = [one for one in callbacks if not isinstance(one, PartialSaving)]
        check_resumed(resumed_from(trainer))
        self._begin(trainer, say=lambda found, *_: end(found), otherwise=end_with_error, is_strict=True)


class LaunchedStock(TrainerCallback):  # type: ignore[misc]
    """Saves a Trainer's own checkpoints in the background. It gives way to a saver of the script."""

    def on_train_begin(self, *_: object, **__: object) -> None:
        trainer = find_trainer(self)
        if not any(isinstance(one, (PartialSaving, StockSaving)) for one in trainer.callback_handler.callbacks):
            attach_stock(trainer, {})  # last in the list that the Trainer is iterating over, so it begins as well
