"""Files of each rank, with DTensors: verl's, and those that accelerate saves with ``use_dcp=False``."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

import llmtailor
from helpers.cases import mostly_long
from helpers.composing import convert, recipe
from llmtailor.codes import Code
from llmtailor.errors import MismatchError, SourceError, UnsafePickle, UnsupportedCheckpoint
from llmtailor.formats.registry import index_checkpoint
from llmtailor.verify.verify import RESUMABLE, verify_checkpoint

# --- what is written --------------------------------------------------------------------------------------------------


def parts_of(tensor: DTensor) -> dict[str, Any]:
    """All that a DTensor consists of but hashes, which differ between processes, and process groups."""
    spec, mesh = tensor._spec, dict(vars(tensor._spec.mesh))
    mesh.pop("_hash"), mesh.pop("_pg_registry")
    ranks = mesh.pop("_rank_map").tolist()
    fields = {key: value for key, value in vars(spec).items() if key not in ("mesh", "_hash")}
    return {"mesh": mesh, "ranks": ranks, "local": tensor._local_tensor.shape, "stride": tensor.stride(), **fields}


@pytest.mark.parametrize(
    "name", mostly_long(["verl", "hsdp", "hsdp-w4", "verl-tied", "ranks"], "verl", "hsdp", "ranks")
)
def test_the_files_are_those_of_torch(runs, tmp_path, name):
    source, out = runs.checkpoint(name), tmp_path / "out"
    convert(source, out)
    names = [path.name for path in source.iterdir() if "rank" in path.name and "extra" not in path.name]
    names = [name for name in names if "rng" not in name]
    assert len(names) == 2 * runs[name].spec.ranks
    for path in names:
        old, new = ({**one, **one.get("state", {})} for one in (load(source / path), load(out / path)))
        assert [*old] == [*new]
        for key, value in old.items():
            kinds = value if isinstance(value, dict) else {"": value}
            for kind, one in kinds.items() if key not in ("state", "param_groups") else ():
                other = new[key][kind] if kind else new[key]
                assert type(one) is type(other)
                if isinstance(one, DTensor):
                    assert parts_of(one) == parts_of(other)
                    one, other = one._local_tensor, other._local_tensor
                if kind or isinstance(value, DTensor) or "rank_0" in path:  # all ranks resume with rank 0's buffers
                    assert torch.equal(one, other)
        if "state" in old and name != "ranks":  # in the order of the model
            groups = [{k: v for k, v in group.items() if k != "lt_params"} for group in new["param_groups"]]
            assert groups == old["param_groups"]


def test_what_is_beside_the_states_comes_along(runs, tmp_path):
    source, more, plain = runs.checkpoint("verl"), tmp_path / "more", tmp_path / "plain"
    convert(source, more, world_size=3)
    first, _, third = (load(more / f"extra_state_world_size_3_rank_{rank}.pt") for rank in range(3))
    own = load(source / "extra_state_world_size_2_rank_0.pt")
    assert first["lr_scheduler"] == third["lr_scheduler"] == own["lr_scheduler"]
    assert torch.equal(third["rng"]["cpu"], own["rng"]["cpu"]) and third["rng"]["random"] == own["rng"]["random"]
    assert json.loads((more / "fsdp_config.json").read_text()) == {"FSDP_version": 2, "world_size": 3}
    there = {path.name for path in (source / "huggingface").iterdir()}
    assert {"config.json", "tokenizer.json"} <= there == {path.name for path in (more / "huggingface").iterdir()}
    convert(more, plain, to="trainer")
    assert there <= {path.name for path in plain.iterdir()}
    assert torch.load(plain / "scheduler.pt")["last_epoch"] == 2
    back = tmp_path / "back"
    convert(plain, back, to="verl", world_size=2)
    assert there == {path.name for path in (back / "huggingface").iterdir()}
    assert load(back / "extra_state_world_size_2_rank_1.pt")["lr_scheduler"]["last_epoch"] == 2


# --- refusals ---------------------------------------------------------------------------------------------------------


def load(path: Path) -> Any:
    return torch.load(path, weights_only=False)


def change(path: str, edit: Callable[[Any], object]) -> Callable[[Path], None]:
    def apply(root: Path) -> None:
        tree = load(root / path)
        edit(tree)
        torch.save(tree, root / path)

    return apply


MODEL, OPTIM = "model_world_size_2_rank_{}.pt", "optim_world_size_2_rank_{}.pt"
HEAD = "lm_head.weight"


class Runs:
    def __reduce__(self) -> Any:
        return os.system, ("touch ran",)


def both(path: str, edit: Callable[[Any], object]) -> Callable[[Path], None]:
    def apply(root: Path) -> None:
        for rank in (0, 1):
            change(path.format(rank), edit)(root)

    return apply


def swapped(root: Path) -> None:
    (root / MODEL.format(0)).rename(root / "other")
    (root / MODEL.format(1)).rename(root / MODEL.format(0))
    (root / "other").rename(root / MODEL.format(1))


def flat(tree: Any) -> None:
    """As of FSDP1"""
    for state in tree["state"].values():
        state.update({kind: state[kind]._local_tensor.flatten() for kind in ("exp_avg", "exp_avg_sq")})


def two_groups(tree: Any) -> None:
    [group] = tree["param_groups"]
    ids = group["params"]
    tree["param_groups"] = [{**group, "params": ids[:5]}, {**group, "params": ids[5:]}]


def exchange(tree: Any) -> None:
    tree["state"][0], tree["state"][1] = tree["state"][1], tree["state"][0]


def renumber(tree: Any) -> None:
    tree["param_groups"][0]["params"].reverse()


def strided(tree: Any) -> None:
    tree[HEAD]._spec.placements = (_StridedShard(0, split_factor=2),)


def narrower(tree: Any) -> None:
    tree[HEAD]._local_tensor = tree[HEAD]._local_tensor[1:]


def later(tree: Any) -> None:
    for state in tree["state"].values():
        state["step"] += 1


def other_world(root: Path) -> None:
    (root / "fsdp_config.json").unlink()
    shutil.copy(root / MODEL.format(0), root / "model_world_size_4_rank_0.pt")


def drop(tree: Any) -> None:
    del tree[HEAD]


def of_fsdp1(root: Path) -> None:
    (root / "fsdp_config.json").write_text('{"FSDP_version": 1, "world_size": 2}')


def without(pattern: str) -> Callable[[Path], None]:
    return lambda root: [path.unlink() for path in root.glob(pattern)] and None


REFUSED: list[tuple[str, Callable[[Path], object], type[SourceError], str]] = [
    ("a lost file", without(MODEL.format(1)), SourceError, "the file is missing"),
    ("lost files", without("model_*"), SourceError, "the file is missing, and 1 of other ranks"),
    ("weights only", without("optim_*"), SourceError, "no optimizer states"),
    ("files of two ranks exchanged", swapped, SourceError, "the piece of another rank"),
    ("a file of another step", change(OPTIM.format(1), later), SourceError, "is 3, and 2 in optim"),
    ("a tensor that one rank lacks", change(MODEL.format(1), drop), SourceError, "some ranks lack"),
    ("fewer rows than the mesh gives", change(MODEL.format(1), narrower), SourceError, "the mesh gives this rank"),
    ("tensor parallelism", both(MODEL, strided), UnsupportedCheckpoint, "cut by _StridedShard"),
    ("an optimizer of FSDP1", both(OPTIM, flat), UnsupportedCheckpoint, "not a DTensor: FSDP1"),
    ("FSDP1", of_fsdp1, UnsupportedCheckpoint, "FSDP1 keeps"),
    ("groups without names", both(OPTIM, two_groups), UnsupportedCheckpoint, "2 param groups without names"),
    ("states of other params", both(OPTIM, exchange), SourceError, "has shape"),
    ("ids of one rank in another order", change(OPTIM.format(1), renumber), SourceError, "other ids"),
    ("files of two numbers of ranks", other_world, SourceError, "files of 2, 4 ranks"),
    ("code", change(MODEL.format(1), lambda tree: tree.update(x=Runs())), UnsafePickle, "posix.system"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "error", "told"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_it_is_refused(runs, tmp_path, monkeypatch, make, error, told):
    monkeypatch.chdir(tmp_path)
    root = shutil.copytree(runs.checkpoint("verl"), tmp_path / "actor")
    make(root)
    with pytest.raises(error, match=told) as caught:
        index_checkpoint(root, "x")
    assert all(problem.fix for problem in caught.value.problems)
    assert not (tmp_path / "ran").exists()


def test_without_schedule_and_random_states_it_is_read(runs, tmp_path):
    root, out = shutil.copytree(runs.checkpoint("verl"), tmp_path / "actor"), tmp_path / "out"
    without("extra_state*")(root)
    assert [one.code for one in verify_checkpoint(root).findings] == [Code.SCHEDULER_MISSING]
    convert(root, out)
    assert load(out / "extra_state_world_size_2_rank_1.pt") == {"lr_scheduler": None}


def test_rates_of_another_save_are_found(runs, tmp_path):
    root, later = shutil.copytree(runs.checkpoint("verl"), tmp_path / "actor"), runs.checkpoint("verl", 4)
    for path in later.glob("extra_state*"):
        shutil.copy(path, root)
    assert Code.SCHEDULER_RATE in [one.code for one in verify_checkpoint(root).findings]


def test_replicas_that_differ_are_refused(runs, tmp_path):
    root = shutil.copytree(runs.checkpoint("hsdp"), tmp_path / "actor")
    change(MODEL.format(1), lambda tree: tree[HEAD]._local_tensor.add_(1))(root)
    with pytest.raises(SourceError, match="not the same as in model_world_size_2_rank_0"):
        index_checkpoint(root)


def test_the_folder_of_a_step_names_the_models_in_it(runs):
    with pytest.raises(UnsupportedCheckpoint, match="the checkpoints of actor") as caught:
        index_checkpoint(runs.checkpoint("verl").parent, "x")
    assert "x/actor" in caught.value.problems[0].fix


def test_one_ranks_pieces_in_an_optimizer_pt_are_refused(runs, tmp_path):
    """As the Trainer saves under tensor parallelism without FSDP: the other ranks' moments are in no file."""
    root = shutil.copytree(runs.checkpoint("no-fsdp"), tmp_path / "checkpoint-2")
    pieces = load(runs.checkpoint("verl") / OPTIM.format(0))["state"]
    change("optimizer.pt", lambda tree: tree["state"].update({0: pieces[0]}))(root)
    with pytest.raises(UnsupportedCheckpoint, match="one rank's pieces"):
        index_checkpoint(root)


def test_a_mesh_without_names_stays_without_names(runs, tmp_path):
    """torch takes a mesh with other names, or with an empty tuple of them, for another mesh, and refuses to load."""

    def unnamed(tree: Any) -> None:
        for one in (*tree.get("state", {}).values(), tree):
            for tensor in one.values():
                if isinstance(tensor, DTensor):
                    vars(tensor._spec.mesh)["_mesh_dim_names"] = None

    root = shutil.copytree(runs.checkpoint("verl"), tmp_path / "actor")
    both(MODEL, unnamed)(root)
    both(OPTIM, unnamed)(root)
    convert(root, tmp_path / "out")
    old, new = (load(one / MODEL.format(0)) for one in (root, tmp_path / "out"))
    assert {key: parts_of(one) for key, one in old.items()} == {key: parts_of(one) for key, one in new.items()}
    assert {one._spec.mesh._mesh_dim_names for one in new.values()} == {None}


def of_another_torch(tree: Any) -> None:
    for tensor in tree.values():
        vars(tensor._spec.mesh)["mesh_dim_names"] = ("fsdp",)


def test_what_another_torch_saved_is_read_but_not_written(runs, tmp_path):
    root = shutil.copytree(runs.checkpoint("verl"), tmp_path / "actor")
    both(MODEL, of_another_torch)(root)
    assert verify_checkpoint(root).level == RESUMABLE
    convert(root, tmp_path / "there", to="dcp")
    with pytest.raises(UnsupportedCheckpoint, match=r"neither of torch 2\.13 nor of 2\.15"):
        convert(root, tmp_path / "out")


@pytest.mark.parametrize("value", [True, False])
def test_a_field_of_a_later_torch_stays(runs, tmp_path, value):
    """torch 2.15 compares it when it loads."""

    def of_2_15(tree: Any) -> None:
        for tensor in tree.values():
            vars(tensor._spec.mesh)["_preserve_rank_order"] = value

    root = shutil.copytree(runs.checkpoint("verl"), tmp_path / "actor")
    both(MODEL, of_2_15)(root)
    convert(root, tmp_path / "out")
    meshes = [vars(tensor._spec.mesh) for tensor in load(tmp_path / "out" / MODEL.format(0)).values()]
    assert {mesh["_preserve_rank_order"] for mesh in meshes} == {value}


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("trainer", {"to": "verl"}, "param groups, and verl's one"),
        pytest.param("hsdp-w4", {"world_size": 3}, "not a multiple of the 2", marks=pytest.mark.long),
        ("verl", {"layout": "accelerate", "to": "verl"}, "no files of another loader"),
    ],
)
def test_what_a_run_could_not_load_is_not_written(runs, tmp_path, name, options, told):
    with pytest.raises(MismatchError, match=told):
        convert(runs.checkpoint(name), tmp_path / "out", **options)


def test_one_group_says_which_params_decay_now(runs, tmp_path):
    options = llmtailor.Options(groups="one", to="verl")
    notices = llmtailor.plan_merge(recipe(runs.checkpoint("trainer")), tmp_path / "out", options).report.notices
    assert any("weight decay 0.1 applies to all params" in one.what for one in notices)
