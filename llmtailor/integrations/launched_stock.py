"""Stock checkpoints in the background, in a program that nobody edits: ``llmtailor run --layout stock``."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from llmtailor.patching import patch_method

LAYOUT = "LLMTAILOR_LAYOUT"


def hook_engine(module: ModuleType) -> None:
    """Attach a saver to every DeepSpeed engine if the environment, or its config, asks for stock checkpoints."""

    @patch_method(module.DeepSpeedEngine, "_configure_checkpointing")
    def configuring(configure: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
        configure(self, *args, **kwargs)
        from llmtailor.stock_saving.checkpoint_engine import KEY, attach_engine

        if os.environ.get(LAYOUT) == "stock":
            attach_engine(self, **_options())
        elif KEY in self.config:
            attach_engine(self)
            with suppress(OSError):  # so that nobody says that there is no saver
                Path(os.environ.get("LLMTAILOR_UNASKED", "")).unlink()


def hook_accelerator(module: ModuleType) -> None:
    """Attach a saver to every Accelerator when it saves a state for the first time."""

    @patch_method(module.Accelerator, "save_state")
    def saving(save: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        if "save_state" in vars(self):  # its own one, which calls this
            return save(self, *args, **kwargs)
        from llmtailor.stock_saving.accelerate import attach_accelerator

        attach_accelerator(self, **_options())
        return self.save_state(*args, **kwargs)


def _options() -> dict[str, Any]:
    from llmtailor.saving.arguments import from_environment, stock_arguments

    return stock_arguments(from_environment(os.environ))[0]


HOOKS: Mapping[str, Callable[[ModuleType], None]] = {
    "deepspeed.runtime.engine": hook_engine,
    "accelerate.accelerator": hook_accelerator,
}
"""Module -> what is called once it was imported"""
