"""Deals out what has sizes: files or params to ranks, parts to saves. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Mapping
from typing import TypeVar

_K = TypeVar("_K", bound=Hashable)


def deal(sizes: Mapping[_K, int], hands: int) -> list[list[_K]]:
    """Return the keys in as many lists as there are hands: the largest first, each to the hand that has least so far.

    Of keys of the same size, the one that is listed first comes first. All ranks compute the same.
    """
    dealt: list[list[_K]] = [[] for _ in range(hands)]
    loads = [(0, hand) for hand in range(hands)]
    for key in sorted(sizes, key=lambda key: -sizes[key]):
        load, hand = loads[0]
        dealt[hand].append(key)
        heapq.heapreplace(loads, (load + sizes[key], hand))
    return dealt
