"""Synthetic checkpoints of every other form, partial ones included, as FSDP and DCP checkpoints."""

from __future__ import annotations

import pytest

from campaigns.fuzz import make_sound
from helpers.cases import mostly_long
from helpers.composing import convert
from llmtailor.formats.registry import index_checkpoint
from llmtailor.verify.verify import RESUMABLE, verify_checkpoint

PARTIAL = ("partial", "partial2", "partial0")
KINDS = ("master", "exp_avg", "exp_avg_sq")


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return make_sound(tmp_path_factory.mktemp("sound"))


def values(index):
    """The bytes of every state, whatever its pieces."""
    found = {}
    for state, held in index.held.items():
        if state.kind in KINDS:
            pieces = [fragment.extent for fragment in held.place.cover(0, held.numel)]
            found[state] = b"".join((index.root / one.path).read_bytes()[one.start : one.stop] for one in pieces)
    return found


@pytest.mark.parametrize("to", ["dcp", "fsdp"])
@pytest.mark.parametrize("form", mostly_long([*PARTIAL, "zero3", "zero2", "plain"], *PARTIAL))
def test_every_state_is_there(sound, tmp_path, form, to):
    convert(sound[form], tmp_path / "out", to=to, world_size=3)
    assert verify_checkpoint(tmp_path / "out", deep=True).level == RESUMABLE
    before, after = index_checkpoint(sound[form]), index_checkpoint(tmp_path / "out")
    assert (after.params, after.tied, after.steps()) == (before.params, before.tied, before.steps())
    assert after.group_params == before.group_params and after.world_size == 3
    wanted = values(before)
    assert len(wanted) == 3 * len(before.steps()) and values(after) == wanted
