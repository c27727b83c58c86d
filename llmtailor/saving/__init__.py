"""For training scripts: save part of the model at each save, and still be able to resume from any of them.

>>> from llmtailor.saving import attach
>>> attach(trainer, policy="parity", save_steps=50)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmtailor.policies import Filter as Filter
    from llmtailor.policies import Full as Full
    from llmtailor.policies import Parity as Parity
    from llmtailor.policies import Policy as Policy
    from llmtailor.policies import RoundRobin as RoundRobin
    from llmtailor.policies import Situation as Situation
    from llmtailor.policies import Update as Update
    from llmtailor.saving.hooks import PartialSaving as PartialSaving
    from llmtailor.saving.hooks import attach as attach
    from llmtailor.saving.log import SaveReport as SaveReport
    from llmtailor.saving.loop import saver_for as saver_for
    from llmtailor.saving.saver import PartialSaver as PartialSaver
    from llmtailor.saving.saver import SaveFailed as SaveFailed

_PUBLIC = {
    "attach": "llmtailor.saving.hooks",
    "PartialSaving": "llmtailor.saving.hooks",
    "saver_for": "llmtailor.saving.loop",
    "PartialSaver": "llmtailor.saving.saver",
    "SaveFailed": "llmtailor.saving.saver",
    "SaveReport": "llmtailor.saving.log",
    **dict.fromkeys(("Filter", "Full", "Parity", "Policy", "RoundRobin", "Situation", "Update"), "llmtailor.policies"),
}
__all__ = [*_PUBLIC]


def __getattr__(name: str) -> Any:
    """Import torch for those who save, and transformers for those who use its Trainer; policies need neither."""
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
