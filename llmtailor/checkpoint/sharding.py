"""How ZeRO-1/2 places the params of a group in a vector, and the vector on the ranks.

Checked against DeepSpeed 0.19.8. A group's params are flattened and concatenated, with an optional gap after each but
the last (``parameter_alignment``). The vector is padded at its end to a multiple of twice the world size and cut into
equal partitions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Vector:
    """One group's vector of elements."""

    offsets: tuple[int, ...]
    """Where each param begins."""
    total: int
    """Elements of params and gaps, without the padding at the end."""
    partition: int
    """Elements per rank, the same on all; the last ranks may hold padding."""

    def padding(self, rank: int) -> int:
        """Return the number of padding elements at the end of a rank's partition."""
        return min(self.partition, max(0, (rank + 1) * self.partition - self.total))

    def on_rank(self, numels: Mapping[str, int], rank: int) -> Iterator[tuple[str, int, int, int]]:
        """Yield (param, begin, end, offset in the partition) of the params that overlap a rank's partition."""
        low, high = rank * self.partition, (rank + 1) * self.partition
        for (param, numel), offset in zip(numels.items(), self.offsets, strict=True):
            begin, end = max(low, offset), min(high, offset + numel)
            if begin < end:
                yield param, begin - offset, end - offset, begin - low


def lay_out_vector(numels: Sequence[int], gaps: Sequence[int], world_size: int) -> Vector:
    """Return the vector of a group's params, given in the order of the vector; empty ``gaps`` means none."""
    offsets, at = [], 0
    for number, numel in enumerate(numels):
        offsets.append(at)
        at += numel + (gaps[number] if gaps else 0)
    partition = -(-at // (2 * world_size)) * 2
    return Vector(tuple(offsets), at, partition)


def alignment_gaps(numels: Sequence[int], itemsize: int, boundary: int = 16) -> tuple[int, ...]:
    """Return the gaps of ``parameter_alignment``: each param but the last is followed by the number of elements that
    aligns the next one to ``boundary`` bytes in the model's dtype."""
    unit, at, gaps = boundary // itemsize, 0, []
    for number, numel in enumerate(numels):
        gap = -(at + numel) % unit if number < len(numels) - 1 else 0
        gaps.append(gap)
        at += numel + gap
    return tuple(gaps)


def round_robin(count: int, world_size: int) -> list[int]:
    """Return the order of a group's params under ``round_robin_gradients``: 0, W, 2W, .. then 1, W+1, .."""
    return [number for start in range(world_size) for number in range(start, count, world_size)]


def part_size(numel: int, world_size: int) -> int:
    """Return the size of each rank's slice of a ZeRO-3 param, in elements, padding included."""
    return -(-numel // world_size)
