"""Small messages between the threads of all ranks, through torch.distributed's key-value store.

There are no collectives: in a thread, they would mix with those of the training.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from llmtailor.saving.ranks import Ranks


class Board:
    """Messages between the threads of all ranks."""

    def __init__(self, ranks: Ranks) -> None:
        self._alone: dict[str, Any] | None = {} if ranks.world_size == 1 else None
        if self._alone is None:
            default = dist.distributed_c10d._get_default_store()
            self._server = default  # rank 0 serves it as long as it exists
            # a connection of its own: training may block on the other one
            own = default.clone() if hasattr(default, "clone") else default
            self._store = dist.PrefixStore("llmtailor", own)  # type: ignore[attr-defined]

    def post(self, key: str, message: Mapping[str, Any]) -> None:
        if self._alone is not None:
            self._alone[key] = message
        else:
            self._store.set(key, json.dumps(message))

    def read(self, *keys: str) -> list[Any] | None:
        """Return the messages if all are there."""
        if self._alone is not None:
            return [self._alone[key] for key in keys] if self._alone.keys() >= {*keys} else None
        return [json.loads(self._store.get(key)) for key in keys] if self._store.check([*keys]) else None

    def count(self, key: str, more: int) -> int:
        """Add to a number, and return it."""
        if self._alone is not None:
            self._alone[key] = self._alone.get(key, 0) + more
            return int(self._alone[key])
        return int(self._store.add(key, more))

    def remove(self, *keys: str) -> None:
        for key in keys:
            if self._alone is not None:
                self._alone.pop(key, None)
            else:
                with suppress(Exception):  # not every store can
                    self._store.delete_key(key)
