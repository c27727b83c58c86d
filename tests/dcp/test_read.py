"""What FSDP trainings have saved, indexed: every state is what the live training held."""

from __future__ import annotations

import pytest
import torch

from helpers.states import assert_holds
from llmtailor.formats.registry import index_checkpoint
from llmtailor.verify.verify import RESUMABLE, verify_checkpoint
from trainings.catalogue import FSDP

FSDP_RUNS = [name for name in FSDP if name != "no-fsdp"]


@pytest.mark.parametrize("name", FSDP_RUNS)
def test_what_a_live_training_held_is_in_the_index_and_resumable(runs, name):
    verdict = verify_checkpoint(runs.checkpoint(name), deep=True)
    assert verdict.level == RESUMABLE, verdict.findings
    for step in (2, 4):
        root = runs.checkpoint(name, step)
        index = index_checkpoint(root, name)
        assert_holds(index, runs[name].held[step])
        assert index.format == ("fsdp" if name.startswith(("trainer", "hf", "fsdp1", "full")) else "dcp")
        assert (index.world_size, index.global_step) == (3 if name.endswith("w3") else 2, step)
        assert index.precision == ("BF16" if "bf16" in name else "F32")
        assert dict(index.tied) == ({"lm_head.weight": "model.embed_tokens.weight"} if "tied" in name else {})


def test_a_metadata_file_pickled_as_python_3_11_2_does(monkeypatch, tmp_path):
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

    from llmtailor.containers.dcp import METADATA, list_data_records

    by_name = lambda self, _: (getattr, (type(self), self.name))  # noqa: E731
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", by_name)
    dcp.save({"model": {"w": torch.ones(3)}}, checkpoint_id=tmp_path / "x", no_dist=True)
    assert b"getattr" in (tmp_path / "x" / METADATA).read_bytes()
    assert sum(map(len, list_data_records(tmp_path / "x", METADATA, "x").values())) > 0


def test_a_frozen_copy_that_differs_somewhere_is_not_tied(tmp_path):
    """A reference model, or an average: most of its rows are those of the trained one."""
    from torch.distributed import checkpoint as dcp

    embed = torch.randn(20_000, 64, generator=torch.Generator().manual_seed(0))
    reference = embed.clone()
    reference[1000:1200] += 1
    state = {"exp_avg": embed * 0, "exp_avg_sq": embed * 0, "step": torch.tensor(3.0)}
    group = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "params": ["embed_tokens.weight"]}
    for other, tied in ((reference, {}), (embed.clone(), {"ref.weight": "embed_tokens.weight"})):
        folder = tmp_path / str(len(tied))
        saved = {
            "model": {"embed_tokens.weight": embed, "ref.weight": other},
            "optim": {"state": {"embed_tokens.weight": state}, "param_groups": [group]},
        }
        dcp.save(saved, checkpoint_id=folder, no_dist=True)
        assert dict(index_checkpoint(folder).tied) == tied
