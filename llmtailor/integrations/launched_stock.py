"""Stock checkpoints in the background, in a program that nobody edits: ``llmtailor run --layout stock``."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

LAYOUT = "LLMTAILOR_LAYOUT"


def hook_engine(module: ModuleType) -> None:
    """Attach a saver to every DeepSpeed engine if the environment, or its config, asks for stock checkpoints."""
    kind = module.DeepSpeedEngine
    configure = kind._configure_checkpointing

    @wraps(configure)
    def configuring(self: Any, *args: Any, **kwargs: Any) -> None:
        configure(self, *args, **kwargs)
        from llmtailor.saving.checkpoint_engine import KEY, attach_engine
        from llmtailor.saving.options import RESUME, from_environment, stock_arguments

        if os.environ.get(LAYOUT) == "stock":
            given = stock_arguments(from_environment(os.environ))
            attach_engine(self, **{name: value for name, value in given.items() if name not in RESUME})
        elif KEY in self.config:
            attach_engine(self)
            with suppress(OSError):  # so that nobody says that there is no saver
                Path(os.environ.get("LLMTAILOR_UNASKED", "")).unlink()

    kind._configure_checkpointing = configuring
