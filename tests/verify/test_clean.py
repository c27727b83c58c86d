"""What stock training leaves behind is resumable, whatever the stage, and every byte of it is as it should be."""

from __future__ import annotations

import json

import pytest

from llmtailor.model.roles import EXP_AVG, MASTER
from llmtailor.verify.verify import NOT_RESUMABLE, RESUMABLE, to_json, verify_checkpoint
from trainings.catalogue import DEEPSPEED

SAYS = {
    "llama-no-gather": "there are no weights",
    "zero1-elastic": "can't be resumed by stock DeepSpeed",
    "zero2-elastic": "can't be resumed by stock DeepSpeed",
}


@pytest.mark.parametrize("name", DEEPSPEED)
def test_every_kind_of_run(runs, name):
    first, *_, last = sorted(runs[name].folder.glob("checkpoint-*"))
    for checkpoint in (first, last):
        read: list[int] = []
        deep = verify_checkpoint(checkpoint, deep=True, on_progress=read.append)
        assert deep.level == (NOT_RESUMABLE if "elastic" in name else RESUMABLE)
        assert [SAYS[name] in finding.what for finding in deep.findings] == ([True] if name in SAYS else [])
        assert not deep.damage.files and not deep.damage.states
        assert verify_checkpoint(checkpoint).findings == deep.findings
        assert json.loads(json.dumps(to_json(deep)))["damaged_states"] == []
        assert deep.index is not None
        optimizer = [held.num_bytes for state, held in deep.index.held.items() if state.kind in (MASTER, EXP_AVG)]
        assert sum(read) > sum(optimizer)
