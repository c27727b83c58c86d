"""What merges record of composites is read back, and refused if it is damaged."""

from __future__ import annotations

import json

import pytest

from llmtailor.checkpoint.index import PartSteps
from llmtailor.errors import SourceError
from llmtailor.formats.composite import read_composite, read_merge, read_part_steps
from llmtailor.frameworks.files import MANIFEST


def test_another_checkpoint_has_no_record(tmp_path):
    assert read_composite(tmp_path, "x") is None
    assert read_merge(tmp_path) is None
    assert read_part_steps(tmp_path, "x") == PartSteps()


def test_a_part_of_several_sources_has_the_oldest_step(tmp_path):
    rows = [
        {"part": "norm", "step": 4, "masters_step": 6},
        {"part": "norm", "step": 2, "only": "weights"},
        {"part": "lm_head", "step": 4},
    ]
    (tmp_path / MANIFEST).write_text(json.dumps({"parts": rows, "is_converted": True, "unclear": ["w"]}))
    steps = read_part_steps(tmp_path, "x")
    assert steps.states == {"norm": 2, "lm_head": 4}
    assert steps.masters == {"norm": 6, "lm_head": 4}  # a row of weights alone says nothing of masters
    assert steps.is_converted and steps.unclear == {"w"}


@pytest.mark.parametrize("content", [{}, {"parts": [{"part": "norm"}]}, {"parts": None}])
def test_a_damaged_record_is_refused(content, tmp_path):
    (tmp_path / MANIFEST).write_text(json.dumps(content))
    for read in (read_part_steps, read_composite):
        with pytest.raises(SourceError, match="the manifest is damaged"):
            read(tmp_path, "x")
