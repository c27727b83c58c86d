"""DCP folders as torch's own loader reads them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed import checkpoint as dcp

from llmtailor.containers.dcp import METADATA

RUNS = ["trainer", "titan", "columns", "trainer-tied", "hf", "loop-frozen"]


def folders(root: Path) -> list[Path]:
    """Return the DCP folders of a checkpoint."""
    return sorted(path.parent for path in root.rglob(METADATA))


def loaded(folder: Path) -> dict[str, object]:
    """Return every value of a folder that torch's own loader reads, except llmtailor's."""
    reader = dcp.FileSystemReader(folder)
    planner = dcp.default_planner._EmptyStateDictLoadPlanner()
    found: dict[str, object] = {}
    dcp.state_dict_loader._load_state_dict(found, reader, planner=planner, no_dist=True)
    flat, _ = torch.distributed.checkpoint._nested_dict.flatten_state_dict(found)
    return {key: value for key, value in flat.items() if not key.startswith("llmtailor")}


def assert_loads_alike(one: Path, other: Path) -> None:
    assert [path.name for path in folders(one)[1:]] == [path.name for path in folders(other)[1:]]
    for mine, theirs in zip(folders(one), folders(other), strict=True):
        found, wanted = loaded(mine), loaded(theirs)
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            assert torch.equal(found[key], value) if torch.is_tensor(value) else found[key] == value, key
