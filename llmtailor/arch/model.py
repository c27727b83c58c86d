"""The parts of a model, by whatever it takes to find them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from llmtailor.arch.hints import undecided
from llmtailor.arch.mergekit_data import architecture_hints
from llmtailor.arch.parts import dissect
from llmtailor.core.anatomy import Anatomy


def dissect_model(
    names: Collection[str], tied: Mapping[str, str], numels: Mapping[str, int], config: Mapping[str, Any] | None
) -> Anatomy:
    """Say which part of the model each tensor belongs to: by the names, and by mergekit's data where they don't tell.

    `config` is the model's config.json. See `dissect` for the rest. Reads mergekit's files, if it is installed and the
    names leave something open; never raises.
    """
    anatomy = dissect(names, tied, numels)
    if config is None or not undecided(anatomy):
        return anatomy
    hints = architecture_hints(config)
    return dissect(names, tied, numels, hints) if hints else anatomy
