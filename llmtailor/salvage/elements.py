"""Sets of elements, as ascending runs ``begin``..``end`` that don't touch. Pure."""

from __future__ import annotations

from collections.abc import Iterable

Runs = tuple[tuple[int, int], ...]


def union(*sets: Runs) -> Runs:
    """Return the elements that are in any of the sets."""
    joined: list[tuple[int, int]] = []
    for begin, end in sorted(run for runs in sets for run in runs if run[0] < run[1]):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return tuple(joined)


def without(runs: Runs, taken: Runs) -> Runs:
    """Return the elements of ``runs`` that are not in ``taken``."""
    left: list[tuple[int, int]] = []
    for begin, end in runs:
        for low, high in taken:
            if low >= end:
                break
            if high > begin:
                left.append((begin, low))
                begin = high
        left.append((begin, end))
    return tuple(run for run in left if run[0] < run[1])


def count(runs: Iterable[tuple[int, int]]) -> int:
    return sum(end - begin for begin, end in runs)
