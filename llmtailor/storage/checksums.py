"""CRC-32, the checksum of zip files, the digests built from it, and XXH3 for whole files.

CRCs of neighbouring runs combine into the CRC of the whole. So the checksum of a state does not depend on how
it was cut over files and ranks, and one pass over the bytes serves the zip records, the files and the states.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from isal import isal_zlib  # several times faster than zlib's own
from xxhash import xxh3_128

from llmtailor.model.states import State

DIGEST = "xxh3_128"
"""What ``--checksum`` takes of whole files: 128 bits at memory speed, which `xxhsum -H2` prints as well."""


def new_digest() -> xxh3_128:
    """Return a digest of no bytes; feed it with `update`."""
    return xxh3_128()


def crc32(data: bytes | memoryview, value: int = 0) -> int:
    """Return the CRC-32 of ``data``, continuing from ``value``."""
    return int(isal_zlib.crc32(data, value))


def combine(first: int, second: int, second_len: int) -> int:
    """Return the CRC-32 of two runs of bytes, the second ``second_len`` long, from the CRC-32 of each."""
    return int(isal_zlib.crc32_combine(first, second, second_len))


def part_digest(states: Iterable[tuple[State, int, int]]) -> str:
    """Return the digest of a part from (state, number of bytes, CRC-32) of its states.

    It is the SHA-256 over one line per state, sorted: ``kind TAB param TAB bytes TAB crc32 as 8 hex digits LF``.
    It detects accidents, not attacks: the CRCs under it are no cryptographic hash.
    """
    lines = sorted(f"{state.kind}\t{state.param}\t{num_bytes}\t{crc:08x}\n" for state, num_bytes, crc in states)
    return "crc32-sha256:" + hashlib.sha256("".join(lines).encode()).hexdigest()
