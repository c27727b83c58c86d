"""Adds a saver to every Trainer of this process, once the script imports transformers, or attests what it resumes.

Python imports the first ``sitecustomize`` on its path at startup, in each rank that a launcher starts. This one needs
nothing but the standard library, so that other programs of a job start as usual, and imports the ``sitecustomize``
that it hides.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any

_TRAINER, _LIGHTNING = "transformers.trainer", "lightning.pytorch.trainer.trainer"
_ENGINE, _ACCELERATOR = "deepspeed.runtime.engine", "accelerate.accelerator"
_IS_ATTESTED = bool(os.environ.get("LLMTAILOR_ATTESTING"))
"""Whether nothing is saved, only attested: see llmtailor/integrations/attested.py"""
_IS_STOCK = os.environ.get("LLMTAILOR_LAYOUT") == "stock"
"""Whether the program's own checkpoints are saved in the background"""
_MODULES = {_TRAINER, _ENGINE}
if _IS_STOCK:
    _MODULES |= {_ACCELERATOR}
if _IS_ATTESTED:
    _MODULES |= {_ACCELERATOR, _LIGHTNING}
    _MODULES |= {"torch.optim.optimizer", "torch.distributed.checkpoint.state_dict"}
_UNASKED = "LLMTAILOR_UNASKED"
"""The variable that names a file, which the first process to import the Trainer removes: see llmtailor/cli/run.py"""
_HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH120 - pathlib costs every process milliseconds


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the module of the Trainer, and its like, as usual, and lets `_Loader` load it."""

    _is_looking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _MODULES or self._is_looking:
            return None
        # launchers import torch, and an engine has a saver only if it is asked for
        if not fullname.startswith("torch.") and (fullname != _ENGINE or _IS_ATTESTED or _IS_STOCK):
            with suppress(OSError):
                os.unlink(os.environ.get(_UNASKED, ""))  # noqa: PTH108
        self._is_looking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._is_looking = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, fullname)
        return spec


class _Loader(importlib.abc.Loader):
    """Loads a module with another loader, and then adds the saver or what attests.

    Unlike an error in this file, one in llmtailor ends the script: it must not train without a saver unnoticed.
    """

    def __init__(self, loader: importlib.abc.Loader, name: str) -> None:
        self._loader, self._name = loader, name

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        try:
            if self._name == _LIGHTNING:
                _hook_lightning(module)
                return
            if self._name == _TRAINER:
                from llmtailor.integrations.launched import LaunchedAttest, LaunchedSaving, LaunchedStock

                launched = LaunchedAttest if _IS_ATTESTED else LaunchedStock if _IS_STOCK else LaunchedSaving
                module.DEFAULT_CALLBACKS.append(launched)
                return
            if _IS_ATTESTED:
                from llmtailor.integrations.attested import HOOKS
            else:
                from llmtailor.integrations.launched_stock import HOOKS
            HOOKS[self._name](module)
        except ImportError as error:  # which a script may catch, and train without a saver
            fix = f"install llmtailor[train] for {sys.executable}"
            raise SystemExit(f"llmtailor can't be imported ({error}); {fix}") from error


def _hook_lightning(module: ModuleType) -> None:
    """Add the callback that attests when training begins: only then can its module be imported."""
    from llmtailor.patching import patch_method

    @patch_method(module.Trainer, "fit")
    def fitting(fit: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        from llmtailor.integrations.lightning import LaunchedLightningAttest

        if not any(isinstance(one, LaunchedLightningAttest) for one in self.callbacks):
            self.callbacks.insert(0, LaunchedLightningAttest())  # before savers
        return fit(self, *args, **kwargs)


def _import_hidden() -> None:
    """Import the ``sitecustomize`` that Python would have imported without this one."""
    path = [folder for folder in sys.path if os.path.abspath(folder or os.curdir) != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


sys.meta_path.insert(0, _Finder())
_import_hidden()
