"""``rng_state.pth`` and ``rng_state_N.pth``: would a resume take what they hold?"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from llmtailor.codes import Code
from llmtailor.core.findings import ERROR, WARNING, Finding
from llmtailor.errors import PathIn
from llmtailor.formats.deepspeed.fields import extent_of
from llmtailor.formats.pickle_nodes import as_tensor
from llmtailor.formats.resumed.model import check_fields
from llmtailor.formats.resumed.random_states import TORCH_STATE_BYTES, TWISTER_WORDS, is_torch_state
from llmtailor.formats.resumed.trainer import RNG_TABLE
from llmtailor.formats.safe_names import OF_ARRAYS, find_refused
from llmtailor.io.sources import open_source

_STATE = struct.Struct("<qiiq")
"""How torch's state begins: seed, words left, whether it is seeded, next word; then the words, in 8 bytes each"""
_COPY_AGAIN = "copy the file again, or leave this checkpoint out"


def check_rng(root: Path, tree: Any, where: str) -> Iterator[Finding]:
    """Yield what keeps a resume from taking a file's states. Of tensors, only that of the CPU's generator is read."""
    yield from find_refused(tree, where, OF_ARRAYS)
    if not isinstance(tree, dict):
        fix = f"a resume fails; {_COPY_AGAIN}"
        yield Finding(where, f"it holds a {type(tree).__name__}, and no random states", fix, Code.FIELD_TYPE, ERROR)
        return
    yield from check_fields(tree, RNG_TABLE, where)
    if is_torch_state(tree.get("cpu")) and not _is_valid(_bytes_of(root, tree["cpu"], where)):
        fix = f"a resume fails, or reads beyond the end; {_COPY_AGAIN}"
        yield Finding(where, "cpu holds no state of torch's generator", fix, Code.FIELD_RANGE, ERROR)


def _bytes_of(root: Path, node: Any, where: str) -> bytes:
    view = as_tensor(node)
    assert view is not None
    extent = extent_of(view, "cpu", where)
    with open_source(root / extent.path, where) as file:
        return file.read(extent.start, extent.stop)


def _is_valid(state: bytes) -> bool:
    """Whether torch takes it: it compares the counters by themselves. Together they count the words, but at first."""
    _, left, seeded, following = _STATE.unpack_from(state)
    words = state[_STATE.size : _STATE.size + 8 * TWISTER_WORDS]
    return (
        len(state) == TORCH_STATE_BYTES
        and seeded == 1
        and ((left, following) == (1, 0) or (left + following == TWISTER_WORDS + 1 and left > 0 < following))
        and any(words)
    )


def find_swapped(saved_as: Mapping[str, str], name: str, may_repeat: bool) -> Iterator[Finding]:
    """Yield files that are another rank's. ``saved_as`` is what each was called when it was saved.

    With ``may_repeat``, some may have been given to several ranks on purpose: a composite for more ranks does that.
    """
    is_mixed = saved_as.keys() != set(saved_as.values())
    if may_repeat and is_mixed:
        return
    for path, other in saved_as.items():
        if path != other and (not is_mixed or other in saved_as):
            what = f"the file was saved as {other}, so it holds the random numbers of another rank"
            fix = "give it its own name back, to repeat dropout exactly"
            yield Finding(PathIn(name, path), what, fix, Code.RNG_SWAPPED, WARNING)
