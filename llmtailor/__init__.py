"""Cut, compose and resume LLM training checkpoints.

>>> import llmtailor
>>> report = llmtailor.merge("recipe.yaml", "runs/x/checkpoint-400-merged")
>>> report = llmtailor.merge_run("runs/x")

``plan_merge`` plans a merge without writing, and ``write`` carries a plan out. ``inspect_checkpoint`` describes a
checkpoint, ``diff`` compares two, and ``verify_checkpoint`` checks whether an unmodified Trainer or DeepSpeed resumes
from one correctly; ``find_latest`` finds the newest checkpoint of a run that does. `llmtailor.saving` saves partial
checkpoints.

Every error raised on purpose is a `TailorError`; its ``problems`` each say where, what and how to fix it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmtailor.compose.plan import MergePlan as MergePlan
    from llmtailor.compose.plan import Options as Options
    from llmtailor.compose.plan import plan_merge as plan_merge
    from llmtailor.compose.report import Report as Report
    from llmtailor.compose.write import merge as merge
    from llmtailor.compose.write import write as write
    from llmtailor.errors import Problem as Problem
    from llmtailor.errors import TailorError as TailorError
    from llmtailor.findings import Finding as Finding
    from llmtailor.live.attesting import attest as attest
    from llmtailor.param_groups import layer_param_groups as layer_param_groups
    from llmtailor.runs.composing import merge_run as merge_run
    from llmtailor.runs.scan import Latest as Latest
    from llmtailor.runs.scan import find_latest as find_latest
    from llmtailor.verify.diff import Diff as Diff
    from llmtailor.verify.diff import diff as diff
    from llmtailor.verify.inspect import inspect_checkpoint as inspect_checkpoint
    from llmtailor.verify.verify import Verdict as Verdict
    from llmtailor.verify.verify import verify_checkpoint as verify_checkpoint

from llmtailor._version import __version__

_NAMES = {
    "llmtailor.compose.plan": "MergePlan Options plan_merge",
    "llmtailor.compose.report": "Report",
    "llmtailor.compose.write": "merge write",
    "llmtailor.errors": "Problem TailorError",
    "llmtailor.findings": "Finding",
    "llmtailor.runs.composing": "merge_run",
    "llmtailor.runs.scan": "Latest find_latest",
    "llmtailor.live.attesting": "attest",
    "llmtailor.param_groups": "layer_param_groups",
    "llmtailor.verify.diff": "Diff diff",
    "llmtailor.verify.inspect": "inspect_checkpoint",
    "llmtailor.verify.verify": "Verdict verify_checkpoint",
}
_PUBLIC = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = ["__version__", *_PUBLIC]

if not TYPE_CHECKING:  # a type checker reads the imports above, and reports names that do not exist

    def __getattr__(name: str) -> object:
        """Import on first use: ``import llmtailor`` and ``llmtailor --help`` stay instant."""
        if name in _PUBLIC:
            return getattr(import_module(_PUBLIC[name]), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        """List the public names, which are not imported yet, too."""
        return sorted({*globals(), *__all__})
