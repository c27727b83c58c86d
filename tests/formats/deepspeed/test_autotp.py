"""DeepSpeed's AutoTP: what stock tools read from its files, and what stock trainings resume from conversions."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import llmtailor
from helpers.composing import convert, convert_to_resume, merge
from helpers.files import flip
from helpers.states import assert_same_states, loaded_by, read
from llmtailor.checkpoint.optimizer import Mesh
from llmtailor.checkpoint.placement import count, union
from llmtailor.codes import Code
from llmtailor.errors import MismatchError, SourceError, UnsupportedCheckpoint
from llmtailor.formats.registry import index_checkpoint
from llmtailor.model.roles import MASTER
from llmtailor.storage.local import OpenFiles
from llmtailor.verify.verify import verify_checkpoint
from oracle.deepspeed_tools import universal
from trainings.catalogue import AUTOTP, long_but
from trainings.harness import Run, Runs, Train
from trainings.spec import Spec

pytestmark = pytest.mark.real
RELATIVE = 2e-5
"""Of the loss, in fp32, where the sums have another order"""
TAG, NORM = "global_step2", "model.norm.weight"
SHORT = {"tp-2", "tp-3", "tp-2-fused"}
HALF: dict[str, Any] = {"ranks": 2, "per_device_batch": 6}
"""One data-parallel rank sees what two have seen"""
RESUMED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "tp 1": ("tp-2", {"mesh": Mesh(tp=1, dp=2)}, {"ranks": 2, "tp": 1}),
    "tp 1 of ZeRO-3": ("tp-3", {"mesh": Mesh(tp=1, dp=2)}, {"ranks": 2, "tp": 1}),
    "dp 1": ("tp-2", {"mesh": Mesh(dp=1)}, HALF),
    "dp 1 of ZeRO-3": ("tp-3", {"world_size": 2}, HALF),
    "stage 3": ("tp-2", {"stage": 3}, {"stage": 3}),
    "stage 1": ("tp-3", {"stage": 1}, {"stage": 1}),
    "tp 3": ("tp-2", {"to": "universal"}, {"ranks": 3, "per_device_batch": 6, "tp": 3, "load_universal": True}),
    "tied": ("tp-3-tied", {"stage": 2, "mesh": Mesh(dp=1)}, {"stage": 2, **HALF}),
    "no heads": ("tp-2-one-head", {"mesh": Mesh(dp=1)}, HALF),
    "bf16": ("tp-1-bf16", {"mesh": Mesh(dp=1)}, HALF),
    "fused": ("tp-2-fused", {"mesh": Mesh(dp=1)}, HALF),
    "fused, tp 1": ("tp-2-fused", {"mesh": Mesh(tp=1, dp=2), "stage": 3}, {"ranks": 2, "tp": 1, "stage": 3}),
    "fsdp": (
        "tp-2",
        {"to": "fsdp", "layout": "accelerate"},
        {"client": "accelerate", "fsdp": True, "tp": 1, "stage": 0},
    ),
}
CASES = long_but({"tp 1", "dp 1", "fused, tp 1"}, RESUMED)
"""What is written from a training, and how it is resumed by DeepSpeed, and by accelerate with FSDP2"""


@pytest.mark.parametrize("name", AUTOTP)
def test_states_are_those_of_the_official_converter(name: str, runs: Runs, tmp_path: Path) -> None:
    source = runs.checkpoint(name)
    if name == "tp-2-one-head":  # which fails on params of which a rank has nothing
        source = convert(source, tmp_path / "out", mesh=Mesh(tp=1))
    theirs, index = universal(source, tmp_path), index_checkpoint(runs.checkpoint(name))
    states = {state: held for state, held in index.held.items() if state in theirs}
    assert len(states) == 3 * len(index.params) == 3 * len(index.steps())
    for state, held in states.items():
        assert torch.equal(read(index.root, held).flatten(), theirs[state].flatten()), state
    assert index.layout.mesh == {"tp": 2, "dp": 2} and index.world_size == 4
    for (param, _), held in index.zero.module.items():  # of ZeRO-1/2: the rounded masters
        master = index.held[next(state for state in states if state == (index.tied.get(param, param), MASTER))]
        assert torch.equal(read(index.root, held), read(index.root, master).to(read(index.root, held).dtype))


@pytest.fixture(scope="module")
def resumed(runs: Runs, train: Train, selected: set[Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    folder, specs = tmp_path_factory.mktemp("converted"), []
    for name in sorted(RESUMED.keys() & selected):
        source, options, changes = RESUMED[name]
        out = convert(runs.checkpoint(source), folder / name / "checkpoint-2", **options)
        verdict = verify_checkpoint(out, deep=True)
        codes = {finding.code for finding in verdict.findings}
        assert verdict.is_resumable and codes <= {Code.RNG_MISSING}, verdict.findings  # an engine saves none
        specs.append(AUTOTP[source].resumed(out, name, **changes))
    # DeepSpeed remembers the degree as long as the process lives
    return {name: run for tp in (1, 2, 3) for name, run in train(one for one in specs if one.tp == tp).items()}


@pytest.mark.parametrize("name", CASES)
def test_stock_trainings_resume(name: str, runs: Runs, resumed: dict[str, Run]) -> None:
    """With tp 1, `llmtailor.attest` compares what the training holds with the files, bit for bit."""
    straight = runs[RESUMED[name][0]].after(2)
    relative = 2e-2 if name == "bf16" else RELATIVE
    if name == "fsdp":  # accelerate's loop draws other data
        assert resumed[name].losses.keys() == straight.keys()
    else:
        assert resumed[name].losses == pytest.approx(straight, rel=relative)


@pytest.mark.long
def test_the_trainer_holds_what_an_engine_with_autotp_held(runs: Runs, train: Train, tmp_path: Path) -> None:
    options: dict[str, Any] = {"layout": "trainer", "groups": "default", "stage": 3, "mesh": Mesh(tp=1, dp=2)}
    out = convert_to_resume(runs.checkpoint("tp-2"), tmp_path / "checkpoint-2", **options)
    spec = Spec("trainer", "heads", layers=2, dtype="fp32", per_device_batch=3, steps=4)
    held, source = loaded_by(train([spec.resumed(out, "trainer")])["trainer"], 2), runs.checkpoint("tp-2")
    assert held["weights"].keys() == held["states"].keys() == index_checkpoint(source).params.keys()
    for (param, kind), entry in index_checkpoint(source).held.items():
        found = held["weights"][param] if kind == MASTER else held["states"][param][kind]
        assert torch.equal(found, read(source, entry)), (param, kind)


@pytest.mark.parametrize("name", long_but(SHORT, AUTOTP))
def test_nothing_is_lost_there_and_back(name: str, runs: Runs, tmp_path: Path) -> None:
    source = runs.checkpoint(name)
    stage = 3 - AUTOTP[name].stage % 2 if "one-head" not in name else 1
    there = convert(source, tmp_path / "there", mesh=Mesh(dp=3), stage=stage)
    back = convert(there, tmp_path / "back", world_size=4, stage=AUTOTP[name].stage)
    before, after = index_checkpoint(source), index_checkpoint(back)
    assert_same_states(after, before)
    assert before.files.keys() - {"zero_to_fp32.py", "zero_to_torch.py"} <= after.files.keys()
    for path in (path for path in before.files if path.endswith("model_states.pt")):
        old, new = (torch.load(root / path, weights_only=False) for root in (source, back))
        assert old.keys() == new.keys()
        assert not [key for key in old if key not in ("module", "ds_config") and repr(old[key]) != repr(new[key])]
        assert [*old["module"]] == [*new["module"]]
        assert all(torch.equal(old["module"][one], new["module"][one]) for one in old["module"])


def test_a_composite_with_a_source_without_tensor_parallelism(runs: Runs, tmp_path: Path) -> None:
    base, older = runs.checkpoint("tp-2", 4), runs.checkpoint("tp-2")
    alone = convert(older, tmp_path / "alone", mesh=Mesh(tp=1), stage=3)
    merge(base, tmp_path / "out", {"layer 0": alone, "norm": alone})
    out, new, old = map(index_checkpoint, (tmp_path / "out", base, older))
    assert out.layout.mesh == {"tp": 2, "dp": 2}
    for state, held in out.held.items():
        index = old if state.param == NORM or ".layers.0." in state.param else new
        assert torch.equal(read(out.root, held), read(index.root, index.held[state])), state
    assert {finding.code for finding in verify_checkpoint(tmp_path / "out", deep=True).findings} <= {Code.STEPS_DIFFER}


@pytest.mark.parametrize("name", ["tp-2", "columns"])
def test_an_average_of_tensors_that_are_cut_by_columns(name: str, runs: Runs, tmp_path: Path) -> None:
    older, newer = (index_checkpoint(runs.checkpoint(name, step)) for step in (2, 4))
    shares = ((older, 0.25), (newer, 0.75))
    weighted = [{"model": str(index.root), "parameters": {"weight": weight}} for index, weight in shares]
    recipe = {"merge_method": "linear", "base_model": str(newer.root), "models": weighted}
    (tmp_path / "average.yaml").write_text(yaml.safe_dump(recipe))
    llmtailor.merge(tmp_path / "average.yaml", tmp_path / "out")
    out = index_checkpoint(tmp_path / "out")
    masters = [state for state in newer.held if state.kind == MASTER]
    assert masters
    for state in masters:
        a, b, c = (read(index.root, index.held[state]).double() for index in (older, newer, out))
        assert torch.allclose(c, 0.25 * a + 0.75 * b, rtol=1e-6, atol=0)


def test_fused_weights_are_two_boxes_of_each_rank(runs: Runs) -> None:
    index = index_checkpoint(runs.checkpoint("tp-2-fused"))
    parallel = index.zero.tensor_parallel
    assert parallel is not None
    cut = parallel.cuts["model.layers.0.mlp.gate_up_proj.weight"]
    rows = [[(box.offsets[0], box.sizes[0]) for box, _ in shard.pieces] for shard in cut.shards]
    assert rows == [[(0, 13), (26, 13)], [(13, 13), (39, 13)]]


def edit(path: str, change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def damage(root: Path) -> None:
        tree = torch.load(root / TAG / path, weights_only=False)
        change(tree)
        torch.save(tree, root / TAG / path)

    return damage


def in_map(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def change_piece(tree: dict[str, Any]) -> None:
        entry = tree["universal_checkpoint_info"]["affine_map"]["params"][r"^lm_head\.weight$"]
        change(entry["ranks"][1]["pieces"][0])

    return edit("mp_rank_00_model_states.pt", change_piece)


def swap(root: Path) -> None:
    one, other = (root / TAG / f"mp_rank_0{rank}_model_states.pt" for rank in (0, 1))
    one.rename(root / "aside")
    other.rename(one)
    (root / "aside").rename(other)


def unsupported(tree: dict[str, Any]) -> None:
    tree["universal_checkpoint_info"]["autotp_unsupported_parameter_patterns"] = {r"^lm_head\.weight$": "interleaved"}


MODEL = "mp_rank_00_model_states.pt"
REFUSED: list[tuple[Callable[[Path], None], type[SourceError], str]] = [
    (edit(MODEL, lambda tree: tree.pop("universal_checkpoint_info")), UnsupportedCheckpoint, "save again"),
    (edit(MODEL, unsupported), UnsupportedCheckpoint, "does not describe"),
    (in_map(lambda piece: piece.update(scale=0.5)), UnsupportedCheckpoint, "scaled"),
    (in_map(lambda piece: piece.update(source=[piece["source"][0], [1, 61]])), UnsupportedCheckpoint, "no boxes"),
    (in_map(lambda piece: piece.update(source=[0, piece["source"][1]])), SourceError, "every element of lm_head"),
    (in_map(lambda piece: piece.update(shape="x")), SourceError, "every element of lm_head"),
    (lambda root: [path.unlink() for path in root.rglob("*mp_rank_01*")], SourceError, "1 tensor-parallel rank, but"),  # type: ignore[list-item]
    (lambda root: (root / TAG / "zero_pp_rank_1_mp_rank_01_optim_states.pt").unlink(), SourceError, "shard 1 of 2"),
    (swap, SourceError, "the shard of another rank"),
    (edit("mp_rank_01_model_states.pt", lambda tree: tree.update(global_steps=3)), SourceError, "global_steps"),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "error", "says"), REFUSED)
def test_refusals(
    damage: Callable[[Path], None], error: type[SourceError], says: str, runs: Runs, tmp_path: Path
) -> None:
    shutil.copytree(runs.checkpoint("tp-2"), tmp_path / "damaged")
    damage(tmp_path / "damaged")
    with pytest.raises(error, match=says):
        index_checkpoint(tmp_path / "damaged")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mesh": Mesh(tp=4)}, "--to universal"),
        ({"mesh": Mesh(tp=2), "to": "fsdp"}, "fsdp has no tensor parallelism"),
        ({"world_size": 5}, "a multiple of 2"),
        ({"world_size": 6, "mesh": Mesh(dp=3)}, "one of them"),
        ({"mesh": Mesh(dp=2, dp_replicate=2)}, "omit dp_replicate"),
    ],
)
def test_meshes_that_cannot_be_written(options: dict[str, Any], says: str, runs: Runs, tmp_path: Path) -> None:
    with pytest.raises(MismatchError, match=says):
        convert(runs.checkpoint("tp-2"), tmp_path / "out", **options)


@pytest.mark.long
def test_zero_3_needs_elements_on_every_rank(runs: Runs, tmp_path: Path) -> None:
    """DeepSpeed itself fails there."""
    with pytest.raises(MismatchError, match="has no element of"):
        convert(runs.checkpoint("tp-2-one-head"), tmp_path / "out", stage=3)


@pytest.mark.parametrize("kind", ["master", "exp_avg"])
def test_verify_compares_what_several_ranks_hold(kind: str, runs: Runs, tmp_path: Path) -> None:
    root = tmp_path / "damaged"
    shutil.copytree(runs.checkpoint("tp-2"), root)
    index = index_checkpoint(root)
    assert not verify_checkpoint(root, deep=True).findings
    parallel = index.zero.tensor_parallel
    assert parallel is not None
    [copy] = next(places for state, places in parallel.copies.items() if state == (NORM, kind))
    [*_, last] = copy.cover(0, 24)
    assert "mp_rank_01" in last.extent.path
    flip(root / last.extent.path, last.extent.stop - 1)
    found = verify_checkpoint(root, deep=True).findings
    [about] = [finding for finding in found if finding.code == Code.RANKS_DIFFER]
    assert NORM in about.what and "1 of 24 elements" in about.what


def test_a_file_that_fails_while_columns_are_read(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """What other ranks hold of the same rows is read; no state is read row by row, unless it is in that file."""
    root, read_into, reads = runs.checkpoint("tp-2"), OpenFiles.read_into, list[str]()
    index = index_checkpoint(root)
    lost = f"{TAG}/zero_pp_rank_0_mp_rank_01_optim_states.pt"

    def fails(self: OpenFiles, path: str, offset: int, room: memoryview) -> None:
        reads.append(path)
        if path == lost:
            raise OSError(errno.EIO, "an input or output error")
        read_into(self, path, offset, room)

    monkeypatch.setattr(OpenFiles, "read_into", fails)
    verdict = verify_checkpoint(root, deep=True)
    [found] = verdict.findings
    assert (found.path, found.code) == (lost, Code.FILE_UNREADABLE)
    wanted, num_fragments = {}, 0
    for state, held in index.held.items():
        there = [*held.place.cover(0, held.numel)]
        num_fragments += len(there)
        if of_file := union([(one.begin, one.end) for one in there if one.extent.path == lost]):
            wanted[state] = of_file
    assert verdict.damage.states == wanted
    assert any(0 < count(runs) < index.held[state].numel for state, runs in wanted.items())
    assert reads.count(lost) == 1
    reads.clear()
    lost = ""
    verify_checkpoint(root, deep=True)
    assert len(reads) < num_fragments / 2, (len(reads), num_fragments)
