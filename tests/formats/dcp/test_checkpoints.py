"""Checkpoints of FSDP and of torch.distributed.checkpoint: as sources, damaged, in composites, and by commands."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

import llmtailor
import oracle.any
from helpers.cases import mostly_long
from helpers.commands import call
from helpers.composing import convert, merge, recipe
from helpers.states import assert_holds, assert_same_held, held_by, of_snapshot, read
from llmtailor.containers.dcp import lay_out_metadata, read_metadata
from llmtailor.containers.safetensors import SINGLE
from llmtailor.errors import MismatchError, SourceError, UnsafePickle, UnsupportedCheckpoint
from llmtailor.formats.param_names import ModelFacts, known_model
from llmtailor.formats.registry import index_checkpoint
from llmtailor.model.roles import State
from llmtailor.verify.verify import RESUMABLE, verify_checkpoint
from trainings.catalogue import FSDP

# --- as sources -------------------------------------------------------------------------------------------------------

FSDP_RUNS = [name for name in FSDP if name != "no-fsdp"]
OF_THE_TRAINER = ("trainer", "hf", "fsdp1", "full", "ranks")
"""Kinds of trainings with the Trainer's files beside the states"""


@pytest.mark.parametrize("name", FSDP_RUNS)
def test_what_a_live_training_held_is_in_the_index_and_resumable(runs, name):
    verdict = verify_checkpoint(runs.checkpoint(name, 4), deep=True)
    assert verdict.level == RESUMABLE, verdict.findings
    index = verdict.index
    assert_holds(index, runs[name].held[4])
    kind = FSDP[name].kind
    assert index.format == ("verl" if kind == "verl" else "fsdp" if kind in OF_THE_TRAINER else "dcp")
    assert (index.world_size, index.global_step) == (FSDP[name].ranks, 4)
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


def test_the_order_of_the_model_is_not_taken_from_a_mesh_that_repeats_tensors(runs, tmp_path):
    """torch lists what rank 0 has saved first, and spreads what ranks repeat."""
    assert index_checkpoint(runs.checkpoint("loop")).train.model_order == tuple(runs["loop"].held[2]["weights"])
    assert index_checkpoint(runs.checkpoint("loop-hsdp")).train.model_order == ()
    convert(runs.checkpoint("loop-hsdp"), tmp_path / "kept", to="trainer")
    with pytest.raises(UnsupportedCheckpoint, match="nothing else states the params' order"):
        convert(runs.checkpoint("loop-hsdp"), tmp_path / "out", to="verl", groups="one")


# --- damaged ----------------------------------------------------------------------------------------------------------

KEY = "model.lm_head.weight"


class Runs:
    def __reduce__(self) -> Any:
        return os.system, ("touch ran",)


def load(root: Path) -> Metadata:
    return pickle.loads((root / ".metadata").read_bytes())


def change(edit: Callable[[Metadata], object]) -> Callable[[Path], None]:
    def apply(root: Path) -> None:
        metadata = load(root)
        edit(metadata)
        (root / ".metadata").write_bytes(pickle.dumps(metadata))

    return apply


def at(key: str, **changes: object) -> Callable[[Path], None]:

    def edit(metadata: Metadata) -> None:
        for index, info in metadata.storage_data.items():
            if index.fqn == key:
                for name, value in changes.items():
                    setattr(info, name, value)

    return change(edit)


def shape(*size: int) -> Callable[[Path], None]:
    def edit(metadata: Metadata) -> None:
        metadata.state_dict_metadata[KEY].size = torch.Size(size)

    return change(edit)


def put_object(root: Path) -> None:
    """Put a pickle that runs code where an option of a param group is: torch loads those without protection."""
    metadata = load(root)
    (info,) = (info for index, info in metadata.storage_data.items() if index.fqn == "optim.param_groups.0.lr")
    buffer = io.BytesIO()
    torch.save(Runs(), buffer)
    path = root / info.relative_path
    info.offset, info.length = path.stat().st_size, buffer.tell()
    with path.open("ab") as file:
        file.write(buffer.getvalue())
    (root / ".metadata").write_bytes(pickle.dumps(metadata))


def bomb(root: Path) -> None:
    """A small file, and more opcodes than a memory holds objects"""
    (root / ".metadata").write_bytes(b"\x80\x02" + b"}" * 100 + b"(" * 2_000_000)


def alias(metadata: Metadata) -> None:
    """Let every tensor of one size be the same bytes."""
    first = next(info for index, info in metadata.storage_data.items() if index.fqn == KEY)
    for index in [index for index in metadata.storage_data if index.fqn == "model.model.embed_tokens.weight"]:
        metadata.storage_data[index] = first


def twice(metadata: Metadata) -> None:
    chunks = metadata.state_dict_metadata[KEY].chunks
    chunks[1] = chunks[0]


def unknown(metadata: Metadata) -> None:
    metadata.storage_data[MetadataIndex("nobody")] = _StorageInfo("__0_0.distcp", 0, 10)


CASES: list[tuple[str, Callable[[Path], object], type[SourceError], str]] = [
    ("code in the metadata", change(lambda m: setattr(m, "planner_data", Runs())), UnsafePickle, "posix.system"),
    ("code in an object", put_object, UnsafePickle, "posix.system"),
    ("a path outside", at(KEY, relative_path="../../x"), SourceError, "not a data file in this folder"),
    ("an absolute path", at(KEY, relative_path="/etc/passwd"), SourceError, "not a data file in this folder"),
    ("a device", at(KEY, relative_path="/dev/zero"), SourceError, "not a data file in this folder"),
    ("bytes beyond the file", at(KEY, offset=10**9), SourceError, "refers to byte"),
    ("a negative offset", at(KEY, offset=-5), SourceError, "no valid place"),
    ("an enormous length", at(KEY, length=10**30), SourceError, "no valid place"),
    ("transformed blobs", at(KEY, transform_descriptors=["zstd"]), UnsupportedCheckpoint, "transformed"),
    ("two tensors in the same bytes", change(alias), SourceError, "the same bytes"),
    ("a chunk twice", change(twice), SourceError, "belong to no chunk"),
    ("a place of nobody", change(unknown), SourceError, "belong to no tensor"),
    ("a tensor larger than any memory", shape(2**62, 2**62), SourceError, "a size is not a shape"),
    ("a tensor larger than its chunks", shape(10**9, 25), SourceError, "overlap"),
    ("another number of dimensions", shape(61, 25, 1), SourceError, "number of dimensions"),
    ("a pickle bomb", bomb, SourceError, "damaged"),
    ("nothing", lambda root: (root / ".metadata").write_bytes(b""), SourceError, "damaged"),
    ("another object", lambda root: (root / ".metadata").write_bytes(pickle.dumps({"a": 1})), SourceError,
     "not the metadata"),
    ("a pipe", lambda root: ((root / "__0_0.distcp").unlink(), os.mkfifo(root / "__0_0.distcp")), SourceError, "pipe"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "error", "told"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_it_is_refused(runs, tmp_path, monkeypatch, make, error, told):
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "checkpoint-2"
    shutil.copytree(runs.checkpoint("loop"), root)
    make(root)
    with pytest.raises(error, match=told) as caught:
        index_checkpoint(root, "x")
    assert all(problem.fix for problem in caught.value.problems)
    assert not (tmp_path / "ran").exists()


# --- in composites ----------------------------------------------------------------------------------------------------


def is_odd(name: str) -> bool:
    return ".layers.1." in name


def mix(even: dict[str, Any], odd: dict[str, Any]) -> dict[str, Any]:
    """What a composite holds: odd layers from one training, everything else from another."""
    return {
        kind: {name: copy((odd if is_odd(name) else even)[kind][name]) for name in even[kind]}
        for kind in ("weights", "states")
    }


def compose(base: Path, odd: Path, out: Path, **options: Any) -> Path:
    merge(base, out, {"odd": odd}, **options)
    verdict = verify_checkpoint(out, deep=True)
    assert verdict.level == RESUMABLE, verdict.findings
    return out


@pytest.fixture
def mixed(runs):
    """Even layers of an FSDP2 run at step 2, odd ones of a DeepSpeed run at step 4"""
    fsdp, deepspeed = runs.checkpoint("trainer"), runs.checkpoint("llama", 4)
    return fsdp, deepspeed, held_by(runs["trainer"], 2), held_by(runs["llama"], 4)


@pytest.mark.parametrize(
    ("to", "ranks"),
    [
        ("fsdp", 3),
        ("deepspeed", 2),
        pytest.param("dcp", 2, marks=pytest.mark.long),
        pytest.param("trainer", 1, marks=pytest.mark.long),
    ],
)
def test_odd_layers_from_deepspeed_even_ones_from_fsdp(mixed, tmp_path, to, ranks):
    fsdp, deepspeed, even, odd = mixed
    out = compose(fsdp, deepspeed, tmp_path / "checkpoint-2", to=to, world_size=ranks, groups="layer")
    wanted = mix(even, odd)
    if to == "deepspeed":
        assert_same_held(of_snapshot(oracle.any.load(out)), wanted)
    else:
        index = index_checkpoint(out)
        hyper = [dict(group.hyper) for group in index.groups]
        assert_holds(index, {**wanted, "groups": hyper})
        assert sorted({one.step for one in index.sub_groups}) == [2, 4]


def test_odd_layers_from_fsdp_even_ones_from_deepspeed(mixed, tmp_path):
    """The base decides the format; its groups are the Trainer's two, so one step has to do for both."""
    fsdp, deepspeed, odd, even = mixed
    out = compose(deepspeed, fsdp, tmp_path / "checkpoint-4")
    found, wanted = of_snapshot(oracle.any.load(out)), mix(even, odd)
    for name, kinds in wanted["states"].items():
        assert float(found["states"][name].pop("step")) == 4
        kinds.pop("step")
    assert_same_held(found, wanted)


@pytest.mark.parametrize(
    "name", mostly_long(["titan", "loop", "hf", "trainer", "columns", "ranks", "verl", "hsdp"], "titan", "verl")
)
def test_a_composite_of_two_steps_keeps_the_step_of_each_param(runs, tmp_path, name):
    """Adam's step is stored per param, in both styles of options."""
    live = runs[name].held
    out = compose(runs.checkpoint(name, 4), runs.checkpoint(name, 2), tmp_path / "out")
    assert_holds(index_checkpoint(out), {**mix(live[4], live[2]), "groups": live[4]["groups"]})


def test_torchtitans_other_values_are_carried(runs, tmp_path):
    import torch.distributed.checkpoint as dcp

    out = compose(runs.checkpoint("titan", 4), runs.checkpoint("titan", 2), tmp_path / "step-4", world_size=3)
    states = {"train_state": {"step": torch.zeros((), dtype=torch.int32)}, "lr_scheduler": {"last_epoch": 0}}
    dcp.load(states, checkpoint_id=out, no_dist=True)
    assert int(states["train_state"]["step"]) == 4
    assert states["lr_scheduler"]["last_epoch"] == 4


def test_a_tensor_in_a_schedulers_state_stays_in_it(runs, tmp_path):
    """As a tensor of its own in the folder, a later reader would not find it in the scheduler's state."""
    there, again, back = tmp_path / "there", tmp_path / "again", tmp_path / "back"
    source = shutil.copytree(runs.checkpoint("trainer"), tmp_path / runs.checkpoint("trainer").name)
    rates = torch.tensor([0.5, 2.0])
    torch.save({**torch.load(source / "scheduler.pt"), "rates": rates}, source / "scheduler.pt")
    convert(source, there, to="dcp")
    convert(there, again, world_size=3)
    convert(again, back, to="fsdp")
    for folder in (there, again):
        entries = read_metadata(folder, ".metadata", "x")
        assert not entries["lr_scheduler.rates"].is_tensor
        assert all(entry.is_tensor for key, entry in entries.items() if key.endswith(".step"))
    assert torch.equal(torch.load(back / "scheduler.pt")["rates"], rates)


@pytest.mark.parametrize(
    ("name", "to", "told"),
    [
        ("titan", "fsdp", ["its values under train_state", "no trainer_state.json"]),
        ("titan", "deepspeed", ["train in F32", "its values under train_state"]),
        ("loop", "trainer", ["scheduler.pt is made for step 2", "no trainer_state.json"]),
        ("trainer", "dcp", ["trainer_state.json, config and the like have no place"]),
        (
            "verl",
            "trainer",
            ["rng in extra_state_world_size_2_rank_0.pt, rng in extra_state_world_size_2_rank_1.pt have"],
        ),
        ("verl", "dcp", ["rng in extra_state_world_size_2_rank_0.pt", "have no place in a DCP folder"]),
        ("llama", "fsdp", ["loss scale, counters and ds_config are left out"]),
        ("llama-ds-both", "fsdp", ["scheduler.pt is made for step 2"]),
    ],
)
def test_what_has_no_counterpart_is_said(runs, tmp_path, name, to, told):
    source = runs.checkpoint(name)
    notices = llmtailor.plan_merge(recipe(source), tmp_path / "out", llmtailor.Options(to=to)).report.notices
    assert all(any(each in notice.what for notice in notices) for each in told), notices
    assert all(notice.fix for notice in notices)


@pytest.mark.parametrize(
    ("name", "told", "dtype", "options"),
    [
        ("titan", "not param groups", None, {"groups": "layer"}),
        ("loop", "has no ZeRO stages", None, {"to": "dcp", "stage": 3}),
        ("loop", "lose what was trained", "BF16", {"to": "dcp"}),
    ],
)
def test_what_a_format_does_not_have_is_refused(runs, tmp_path, name, told, dtype, options):
    with pytest.raises(MismatchError, match=told):
        convert(runs.checkpoint(name), tmp_path / "out", dtype=dtype, **options)


def forget_roles(folder: Path) -> None:
    """Make of a composite what a training saves."""
    entries = {key: one for key, one in read_metadata(folder, ".metadata", "x").items() if "llmtailor" not in key}
    (folder / ".metadata").write_bytes(b"".join(one.data for one in lay_out_metadata(".metadata", entries).each()))
    (folder / "llmtailor.json").unlink()


def test_zero_3_asks_the_model_for_buffers(runs, tmp_path):
    """It keeps them in other files than frozen params; DeepSpeed refuses, or drops, what is in the wrong one."""
    source, there, again, out = runs["llama-extras-layer"].checkpoint(4), *(tmp_path / name for name in "abc")
    convert(source, there, to="dcp")
    forget_roles(there)
    convert(there, again, world_size=3)  # whose reader is not told otherwise
    to_zero_3 = {"to": "deepspeed", "stage": 3, "world_size": 2}
    plain, second = tmp_path / "plain", tmp_path / "zero2"  # where a guess stays one
    convert(there, plain, to="trainer")
    convert(plain, second, **(to_zero_3 | {"stage": 2}))
    stock = Path(shutil.copytree(plain, tmp_path / "stock"))
    (stock / "llmtailor.json").unlink()
    save_file(load_file(stock / SINGLE), stock / SINGLE, {"format": "pt"})
    params = index_checkpoint(source).params
    shapes = {name: param.shape for name, param in params.items() if param.role != "buffer"}
    facts = ModelFacts(shapes, frozenset(), {}, frozenset(params.keys() - shapes.keys()))
    for folder in (there, again, plain, second, stock):
        with pytest.raises(UnsupportedCheckpoint, match="frozen params and buffers"):
            convert(folder, out, **to_zero_3)
        with known_model(facts):
            convert(folder, tmp_path / f"{folder.name}-3", **to_zero_3)
        assert index_checkpoint(tmp_path / f"{folder.name}-3").params == params


def test_buffers_are_known_from_the_other_source(runs, tmp_path):
    """As a training saves them, without llmtailor's list"""
    source, there = runs["llama-extras-layer"].checkpoint(4), tmp_path / "there"
    convert(source, there, to="dcp")
    forget_roles(there)
    assert index_checkpoint(there).params != index_checkpoint(source).params
    for base, other in ((there, source), (source, there)):
        out = tmp_path / f"on-{base.name}"
        merge(base, out, {"odd": other}, **({"to": "deepspeed", "stage": 3} if base == source else {}))
        assert index_checkpoint(out).params == index_checkpoint(source).params


@pytest.mark.parametrize("to", mostly_long(["dcp", "fsdp"], "fsdp"))
def test_buffers_and_frozen_params_survive_the_way_through(runs, tmp_path, to):
    """A DCP folder does not tell them from each other; llmtailor's own lists the buffers."""
    source, there, back = runs["llama-extras-layer"].checkpoint(4), tmp_path / "there", tmp_path / "back"
    convert(source, there, to=to, world_size=3)
    assert verify_checkpoint(there, deep=True).level == RESUMABLE
    convert(there, back, dtype="BF16", to="deepspeed", world_size=2, stage=3)
    first, last = oracle.any.load(source), oracle.any.load(back)
    assert index_checkpoint(there).params == index_checkpoint(source).params
    assert first.names("buffer") == last.names("buffer") and first.names("frozen") == last.names("frozen")
    for state, tensor in first.states.items():
        if state.kind == "buffer":  # all ranks resume with rank 0's
            assert torch.equal(last.states[state], tensor[:1].expand_as(tensor)), state
        elif state.kind != "weight":
            assert torch.equal(last.states[state], tensor), state


# --- by commands ------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(runs, tmp_path):

    def copy(name):
        shutil.copytree(runs[name].folder, tmp_path / "run")
        return tmp_path / "run"

    return copy


@pytest.mark.parametrize("name", ["trainer", "titan"])
def test_a_run_is_composed(run, runs, name):
    folder = run(name)
    done = call("merge", "--run", str(folder), "--strategy", "parity", str(folder / "out"), "--json")
    steps = {row["part"]: row["step"] for row in json.loads(done.stdout)["parts"]}
    assert steps == {part: 2 if part == "layer 1" else 4 for part in steps}
    index = index_checkpoint(folder / "out")
    for step, param in ((2, "model.layers.1.mlp.up_proj.weight"), (4, "model.layers.2.mlp.up_proj.weight")):
        live = runs[name].held[step]["states"][param]["exp_avg"]
        assert torch.equal(read(index.root, index.held[State(param, "exp_avg")]), live)


@pytest.mark.parametrize("name", mostly_long(["trainer", "titan", "hf", "full", "verl", "ranks"], "hf", "verl"))
def test_an_output_is_replaced(runs, tmp_path, name):
    """Only by --force, and only if it holds nothing else"""
    source, out = runs.checkpoint(name), tmp_path / "out"
    convert(source, out)
    with pytest.raises(llmtailor.TailorError, match="already exists"):
        convert(source, out)
    convert(source, out, replace=True, checksum=True)
    (out / "notes.txt").touch()
    with pytest.raises(llmtailor.TailorError, match=r"notes\.txt"):
        convert(source, out, replace=True)
