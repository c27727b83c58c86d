"""The key-value store of torch.distributed, through which threads of the ranks exchange JSON messages.

There are no collectives: in a thread, they would mix with those of a training. A heartbeat is a number in the store
that grows; a waiting rank compares it with the one that it read before, by its own clock.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

_POLL_S = (0.005, 0.25)
"""Seconds between two reads: first and longest"""
PULSE_S = 5.0
"""Seconds between two heartbeats, and between two reads of one"""


class KeyValueStore:
    """Messages by key, in a store of torch.distributed or in one that has its methods.

    ``server`` is what must exist as long as the store is used.
    """

    def __init__(self, store: Any, server: object = None) -> None:
        self._store, self._server = store, server

    def set(self, key: str, message: Any) -> None:
        """Leave a message, in place of the one before."""
        self._store.set(key, json.dumps(message))

    def get(self, *keys: str) -> list[Any] | None:
        """Return the messages of these keys if all are there."""
        return [json.loads(self._store.get(key)) for key in keys] if self._store.check([*keys]) else None

    def count(self, key: str, more: int) -> int:
        """Add to a number, and return it."""
        return int(self._store.add(key, more))

    def remove(self, *keys: str) -> None:
        """Remove messages, if they are there."""
        for key in keys:
            with suppress(Exception):  # not every store can
                self._store.delete_key(key)


class LocalStore(dict[str, Any]):
    """The store of one process without torch.distributed."""

    set = dict.__setitem__
    get = dict.__getitem__  # type: ignore[assignment]

    def check(self, keys: list[str]) -> bool:
        return self.keys() >= {*keys}

    def add(self, key: str, more: int) -> int:
        self[key] = self.setdefault(key, 0) + more
        return int(self[key])

    def delete_key(self, key: str) -> bool:
        return self.pop(key, None) is not None


class Pulse:
    """A heartbeat that ranks share: a number in the store that grows while any of them makes progress."""

    def __init__(self, store: KeyValueStore, key: str) -> None:
        self._store, self._key = store, key
        self._seen, self._at = 0, time.monotonic()

    def _is_due(self) -> bool:
        now = time.monotonic()
        if is_due := now - self._at > PULSE_S:
            self._at = now
        return is_due

    def beat(self) -> None:
        """Count up, unless the last time was just now."""
        if self._is_due():
            self._store.count(self._key, 1)

    def is_new(self) -> bool:
        """Whether any rank has counted up since the last read; not if that was just now."""
        before = self._seen
        if self._is_due():
            self._seen = self._store.count(self._key, 0)
        return self._seen != before


def await_messages(store: KeyValueStore, keys: list[str], check: Callable[[], object]) -> list[Any]:
    """Return the messages of these keys once all are there; ``check``, called after each read, may raise."""
    for _ in turns():
        if (messages := store.get(*keys)) is not None:
            return messages
        check()
    raise AssertionError("turns() ends only when is_over() returns True")


def turns(is_over: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Yield, with growing pauses, until it is over.

    Without locks, because a signal handler may interrupt the same loop and wait for the same thing.
    """
    pause, longest = _POLL_S
    yield
    while not is_over():
        time.sleep(pause)
        pause = min(1.1 * pause, longest)  # a wait ends at most a tenth too late: a save has up to three of them
        yield
