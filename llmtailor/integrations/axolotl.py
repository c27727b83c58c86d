"""A plugin of axolotl::

plugins:
  - llmtailor.integrations.axolotl.TailorPlugin
llmtailor:
  policy: parity
  save_steps: 50
"""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel, Field
from transformers import Trainer

from llmtailor.saving import attach


class TailorArgs(BaseModel):  # type: ignore[misc]
    """The key ``llmtailor`` of axolotl's YAML: the arguments of `attach`."""

    llmtailor: dict[str, Any] = Field(default_factory=dict)


class TailorPlugin(BasePlugin):  # type: ignore[misc]
    """Attaches the saver to axolotl's Trainer."""

    def get_input_args(self) -> str:
        return f"{TailorArgs.__module__}.{TailorArgs.__name__}"

    def post_trainer_create(self, cfg: Any, trainer: Trainer) -> None:
        attach(trainer, **(cfg.llmtailor or {}))
