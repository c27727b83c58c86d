"""For training scripts: save part of the model at each save, and resume from any of them.

>>> from llmtailor.saving import attach
>>> attach(trainer, save_steps=50)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmtailor.background.options import SavingOptions as SavingOptions
    from llmtailor.background.pending import PendingSave as PendingSave
    from llmtailor.background.report import SaveFailed as SaveFailed
    from llmtailor.background.report import SaveReport as SaveReport
    from llmtailor.dcp_saving.saver import DcpSaver as DcpSaver
    from llmtailor.policies import Adaptive as Adaptive
    from llmtailor.policies import Filter as Filter
    from llmtailor.policies import Full as Full
    from llmtailor.policies import MomentsInTurn as MomentsInTurn
    from llmtailor.policies import Parity as Parity
    from llmtailor.policies import Policy as Policy
    from llmtailor.policies import RoundRobin as RoundRobin
    from llmtailor.policies import Situation as Situation
    from llmtailor.policies import make_policy as make_policy
    from llmtailor.saving.api import saver_for as saver_for
    from llmtailor.saving.callbacks import AttestResume as AttestResume
    from llmtailor.saving.callbacks import PartialSaving as PartialSaving
    from llmtailor.saving.callbacks import attach as attach
    from llmtailor.saving.restart import newest_checkpoint as newest_checkpoint
    from llmtailor.saving.saver import PartialSaver as PartialSaver
    from llmtailor.stock_saving.accelerate import attach_accelerator as attach_accelerator
    from llmtailor.stock_saving.checkpoint_engine import attach_engine as attach_engine

_NAMES = {
    "llmtailor.policies": "Adaptive Filter Full MomentsInTurn Parity Policy RoundRobin Situation make_policy",
    "llmtailor.saving.api": "saver_for",
    "llmtailor.saving.callbacks": "AttestResume PartialSaving attach",
    "llmtailor.stock_saving.checkpoint_engine": "attach_engine",
    "llmtailor.dcp_saving.saver": "DcpSaver",
    "llmtailor.background.options": "SavingOptions",
    "llmtailor.saving.restart": "newest_checkpoint",
    "llmtailor.background.pending": "PendingSave",
    "llmtailor.background.report": "SaveFailed SaveReport",
    "llmtailor.saving.saver": "PartialSaver",
    "llmtailor.stock_saving.accelerate": "attach_accelerator",
}
_PUBLIC = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = [*_PUBLIC]

if not TYPE_CHECKING:  # a type checker reads the imports above, and reports names that do not exist

    def __getattr__(name: str) -> object:
        """Import on first use: policies need no torch, and only `attach` needs transformers."""
        if name in _PUBLIC:
            return getattr(import_module(_PUBLIC[name]), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        """List the public names, which are not imported yet, too."""
        return sorted({*globals(), *__all__})
