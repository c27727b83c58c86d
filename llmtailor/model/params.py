"""What the model is made of: params and buffers, and the tensors they are saved as."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Param:
    """A param or persistent buffer of the model, as the training run knew it."""

    name: str
    shape: tuple[int, ...]
    role: str
    """``trainable``, ``frozen`` or ``buffer``"""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class SavedAs:
    """A tensor of a weight file: elements of a param, from ``begin`` on, under a name that may be another."""

    name: str
    shape: tuple[int, ...]
    begin: int = 0
