"""Blobs that differ in nothing but their elements are decoded once."""

from __future__ import annotations

from collections import Counter

import torch
import torch.distributed.checkpoint as dcp

from llmtailor.containers import torch_file as torch_zip
from llmtailor.errors import Problems
from llmtailor.formats.dcp.folder import read_folder


def test_blobs_of_one_shape_and_dtype_are_decoded_once(tmp_path, monkeypatch):
    state = {f"layers.{number}.weight": torch.full((5, 3 + number % 2), float(number)) for number in range(60)}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    decoded = Counter()
    real = torch_zip.read_pickle
    monkeypatch.setattr(torch_zip, "read_pickle", lambda *args: decoded.update("1") or real(*args))
    problems = Problems()
    folder = read_folder(tmp_path, "", "x", problems)
    assert not problems.errors
    assert decoded.total() == 2
    for key, stored in folder.tensors.items():
        (one,) = stored.held.place.cover(0, stored.held.numel)
        data = (tmp_path / one.extent.path).read_bytes()[one.extent.start : one.extent.stop]
        assert data == state[key].numpy().tobytes()
