"""Lightning's checkpoints: judged, composed, converted and resumed by Lightning itself.

A run's epochs end with a checkpoint, because Lightning begins the data anew when it resumes in the middle of one. From
a copy the losses are those of the straight run, to the last digit.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from click.testing import CliRunner

from helpers.cases import mostly_long
from helpers.commands import forget_urls
from helpers.composing import convert, merge
from helpers.files import flip
from helpers.same import assert_same, plain
from helpers.states import assert_same_states
from llmtailor.cli.main import cli
from llmtailor.codes import Code
from llmtailor.errors import MismatchError, SourceError, UnsupportedCheckpoint
from llmtailor.findings import ERROR
from llmtailor.formats.provenance import stated_attempt
from llmtailor.formats.registry import display_name, index_checkpoint
from llmtailor.frameworks.files import CKPT
from llmtailor.model.roles import EXP_AVG, State
from llmtailor.runs.folder import RunFolder
from llmtailor.runs.scan import find_latest
from llmtailor.verify.verify import RESUMABLE, verify_checkpoint
from partial.scene import bundles, edit_header
from thin.scene import call, compose, folders
from trainings.catalogue import LIGHTNING, LIGHTNING_OPTIMIZERS, LIGHTNING_SAVED
from trainings.harness import Run, Runs, Train, TrainingFailed
from trainings.harness import train as train_here
from trainings.spec import NEWEST

pytestmark = pytest.mark.real


def findings_of(path: Path, *, deep: bool = False) -> list[tuple[str, Code]]:
    return [(one.severity, one.code) for one in verify_checkpoint(path, deep).findings]


def ckpt_path(out: Path) -> Path:
    """What ``trainer.fit(ckpt_path=...)`` takes."""
    return out / CKPT if (out / CKPT).is_file() else out


@pytest.mark.parametrize(("name", "is_refused"), [("lightning", False), ("lightning-zero-2", True)])
def test_later_saves_are_said_to_be_refused_where_they_are(
    name: str, is_refused: bool, runs: Runs, tmp_path: Path
) -> None:
    """Under DeepSpeed all params make their steps together; without it, any may lag behind."""
    older, base = (runs.checkpoint(name, step) for step in (2, 4))
    groups = ["--groups", "layer"] if is_refused else []
    (tmp_path / "recipe.yaml").write_text(f"base_model: {base}\nparts: [{{from: {older}, select: odd}}]\n")
    plan = call("merge", tmp_path / "recipe.yaml", "--dry-run", *groups)
    assert {step for row in plan["optimizer_steps"] for step in [row["step"]]} == {2, 4}
    assert [notice["where"] for notice in plan["notices"]].count("optimizer") == is_refused


def test_what_is_no_state_is_copied(runs: Runs, tmp_path: Path) -> None:
    source = runs.checkpoint("lightning-groups")
    out = convert(source, tmp_path / "checkpoint-2")
    before, after = (torch.load(path, weights_only=False) for path in (source, out / CKPT))
    assert [*after] == [*before] and [*after["state_dict"]] == [*before["state_dict"]]
    for key in before.keys() - {"state_dict", "optimizer_states"}:
        assert repr(after[key]) == repr(before[key]), key
    for name, tensor in before["state_dict"].items():
        assert torch.equal(after["state_dict"][name], tensor)
    places = [{name: tensor.data_ptr() for name, tensor in one["state_dict"].items()} for one in (before, after)]
    shared = [{tuple(sorted(n for n in place if place[n] == at)) for at in place.values()} for place in places]
    assert shared[0] == shared[1] and max(map(len, shared[0])) == 2  # embedding and head
    assert "equal: all" in CliRunner().invoke(cli, ["diff", str(source), str(out)]).stdout


@pytest.mark.parametrize("name", ["lightning-groups", "lightning-zero-2"])
def test_a_flipped_bit_is_refused(name: str, runs: Runs, tmp_path: Path) -> None:
    """If what is read is compared with the checksums in its files."""
    sound, source = runs.checkpoint(name), tmp_path / runs.checkpoint(name).name
    shutil.copytree(sound, source) if sound.is_dir() else shutil.copy(sound, source)
    index = index_checkpoint(source)
    state = next(state for state, entry in index.held.items() if state.kind == EXP_AVG and entry.numel > 100)
    (fragment,) = index.held[state].place.cover(5, 6)
    flip(source / fragment.extent.path, fragment.extent.start)
    with pytest.raises(SourceError, match="does not match its checksum"):
        merge(source, tmp_path / "out", checksum=True)
    merge(source, tmp_path / "out")


@pytest.fixture(scope="module")
def resumed(runs: Runs, train: Train, selected: set[Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Resume from copies and conversions that the tests of this session ask for, and from composites of partial
    checkpoints."""
    folder, place, specs = tmp_path_factory.mktemp("converted"), tmp_path_factory.mktemp("resumed"), []
    for case in sorted(case for case in selected if "-on-" in case):
        name, _, ranks = case.rpartition("-on-")
        out = convert(runs.checkpoint(name), folder / case, world_size=int(ranks))
        changes = {"ranks": int(ranks), "per_device_batch": 6 // int(ranks)}
        specs.append(runs[name].spec.resumed(ckpt_path(out), case, **changes))
    for name, spec in ((name, spec) for name, spec in LIGHTNING_SAVED.items() if name in selected):
        for step in (1, 2):  # all that a run had saved which was killed then
            partial = runs[name].partial(step)
            shutil.copytree(partial, place / name / "partial" / partial.name)
        specs.append(spec.resumed(NEWEST, name))
    return train(specs, place)


OTHER_RANKS = ("lightning-on-1", "lightning-zero-2-on-1", "lightning-on-3", "lightning-zero-3-on-3")
"""The same batch is summed up in another order."""
GOING_ON = ("lightning-groups-on-2", "lightning-zero-2-on-2", "lightning-8bit-on-2", *LIGHTNING_SAVED)
WITH_OTHERS = tuple(f"{name}-on-2" for name in LIGHTNING_OPTIMIZERS if name != "lightning-8bit")


@pytest.mark.parametrize("case", mostly_long([*GOING_ON, *WITH_OTHERS, *OTHER_RANKS], *GOING_ON))
def test_lightning_goes_on_as_if_nothing_had_happened(case: str, runs: Runs, resumed: dict[str, Run]) -> None:
    straight = runs[case.partition("-on-")[0]].after(2)
    assert resumed[case].losses == (pytest.approx(straight, rel=1e-5) if case in OTHER_RANKS else straight)
    if case in LIGHTNING_SAVED:  # one rank has composed it, for all
        assert [path.name for path in resumed[case].folder.glob("checkpoint-*")] == ["checkpoint-2"]


@pytest.mark.parametrize("name", LIGHTNING_OPTIMIZERS)
def test_states_of_other_optimizers_are_composed_whole(name: str, runs: Runs, tmp_path: Path) -> None:
    older, base = (runs.checkpoint(name, step) for step in (2, 4))
    (tmp_path / "recipe.yaml").write_text(f"base_model: {base}\nparts: [{{from: {older}, select: odd}}]\n")
    call("merge", tmp_path / "recipe.yaml", tmp_path / "out")
    assert findings_of(tmp_path / "out", deep=True) == []
    old, new, found = (
        torch.load(path, weights_only=False)["optimizer_states"][0] for path in (older, base, tmp_path / "out" / CKPT)
    )
    listed = [param for group in index_checkpoint(base).groups for param in group.params]
    assert len(listed) == len(found["state"]) == len(new["state"])
    for number, param in enumerate(listed):
        wanted = (old if ".layers.1." in param else new)["state"][number]
        assert_same(plain(found["state"][number]), plain(wanted), param)


@pytest.mark.parametrize("name", LIGHTNING_SAVED)
def test_partial_checkpoints_hold_what_lightning_saves(name: str, runs: Runs, tmp_path: Path) -> None:
    run = runs[name].folder
    for step in (1, 2, 3, 4):
        partial = runs[name].partial(step)
        assert findings_of(partial, deep=True) == [] and index_checkpoint(partial).framework == "lightning"
    out, stock = compose(run, 4, tmp_path / "checkpoint-4"), runs.checkpoint(name, 4)
    assert findings_of(out, deep=True) == []
    attempt = stated_attempt(stock)
    assert attempt is not None and stated_attempt(out) == attempt
    composed, saved = index_checkpoint(out), index_checkpoint(stock)
    assert_same_states(composed, saved)
    if not saved.form.stage:
        one, two = (torch.load(path, weights_only=False) for path in (out / CKPT, stock))
        assert one.keys() == two.keys() and [*one["state_dict"]] == [*two["state_dict"]]
        for key in ("loops", "lr_schedulers", "hyper_parameters", "global_step", "epoch"):
            assert one[key] == two[key]


@pytest.mark.parametrize("names", [..., [], {}])
def test_a_partial_checkpoint_without_the_models_names_is_refused(names: Any, runs: Runs, tmp_path: Path) -> None:
    partial = shutil.copytree(
        runs["lightning-saver"].partial(2), tmp_path / "partial" / runs["lightning-saver"].partial(2).name
    )

    def change(header: dict[str, Any]) -> None:
        tree = json.loads(header["__metadata__"][f"tree:{CKPT}"])
        changed = {key: names if key == "state_dict" else value for key, value in tree.items()}
        kept = {key: value for key, value in changed.items() if value is not ...}
        header["__metadata__"][f"tree:{CKPT}"] = json.dumps(kept)

    assert findings_of(partial) == []
    edit_header(bundles(partial)[0], change)
    with pytest.raises(SourceError, match="state_dict"):
        index_checkpoint(partial)


def forget_full(run: Path) -> None:
    for path in run.glob("*.ckpt"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.parametrize("name", mostly_long(["lightning", "lightning-zero-2", "lightning-zero-3"], "lightning"))
def test_a_killed_training_goes_on_from_partial_checkpoints(name: str, runs: Runs, tmp_path: Path) -> None:
    spec = replace(LIGHTNING[name], name="run", saver="parity", dies_at=3)
    with pytest.raises(TrainingFailed, match="rank"):
        train_here([spec], tmp_path)
    forget_full(tmp_path / "run")
    call("merge", "--run", tmp_path / "run", "--at", 2)
    out = tmp_path / "run" / "checkpoint-2"
    assert findings_of(out, deep=True) == []
    again = spec.resumed(ckpt_path(out), "run", dies_at=0)
    (run,) = train_here([again], tmp_path).values()
    straight = runs[name].losses
    assert run.losses.keys() == {3, 4} and all(run.losses[step] < 1.1 * straight[step] for step in run.losses)
    assert findings_of(RunFolder(tmp_path / "run").full()[4]) == []  # Lightning's own, of params with several steps
    forget_full(tmp_path / "run")
    call("merge", "--run", tmp_path / "run")
    assert findings_of(tmp_path / "run" / "checkpoint-4", deep=True) == []


def edited(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        tree = torch.load(path, weights_only=False)
        change(tree)
        torch.save(tree, path)

    return damage


def _shorter(tree: dict[str, Any]) -> None:
    tree["lr_schedulers"][0]["base_lrs"].append(1.0)


def _steps(tree: dict[str, Any]) -> None:
    for state in tree["optimizer_states"][0]["state"].values():
        state["step"] += 1


def _progress(tree: dict[str, Any]) -> dict[str, Any]:
    return tree["loops"]["fit_loop"]["epoch_loop.automatic_optimization.optim_progress"]  # type: ignore[no-any-return]


DAMAGES: list[tuple[str, Callable[[Path], object], Code]] = [
    ("cut short", lambda path: path.write_bytes(path.read_bytes()[:1000]), Code.FILE_DAMAGED),
    ("no optimizer", edited(lambda tree: tree.pop("optimizer_states")), Code.NO_CHECKPOINT),
    ("no schedulers", edited(lambda tree: tree.pop("lr_schedulers")), Code.FIELD_MISSING),
    ("no loops", edited(lambda tree: tree.pop("loops")), Code.FIELD_MISSING),
    ("no weights", edited(lambda tree: tree.pop("state_dict")), Code.FIELD_MISSING),
    ("no version", edited(lambda tree: tree.pop("pytorch-lightning_version")), Code.FIELD_MISSING),
    ("no count", edited(lambda tree: _progress(tree)["optimizer"].clear()), Code.FIELD_TYPE),
    ("another count", edited(lambda tree: tree.update(global_step=3)), Code.STEPS_DIFFER),
    ("moments of another save", edited(_steps), Code.STEPS_DIFFER),
    ("no states", edited(lambda tree: tree["optimizer_states"][0]["state"].clear()), Code.STEPS_DIFFER),
    ("a schedule of other groups", edited(_shorter), Code.SCHEDULER_LENGTH),
]


@pytest.mark.parametrize(("damage", "code"), [pytest.param(*rest, id=title) for title, *rest in DAMAGES])
def test_a_damage_is_told(damage: Callable[[Path], object], code: Code, runs: Runs, tmp_path: Path) -> None:
    path = tmp_path / "epoch=0-step=2.ckpt"
    shutil.copy(runs.checkpoint("lightning"), path)
    damage(path)
    assert (ERROR, code) in findings_of(path)


@pytest.mark.parametrize("is_composite", [False, True])
def test_a_byte_of_a_tensor_is_told_and_salvaged(is_composite: bool, runs: Runs, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for step in (2, 4):
        source = runs.checkpoint("lightning", step)
        if is_composite:
            convert(source, run / f"checkpoint-{step}")
        else:
            shutil.copy(source, run / source.name)
    newest = RunFolder(run).full()[4]
    path = ckpt_path(newest) if is_composite else newest
    index = index_checkpoint(newest)
    held = index.held[State("model.model.layers.1.mlp.up_proj.weight", "exp_avg")]
    at = next(iter(held.place.cover(0, 1))).extent.start
    data = bytearray(path.read_bytes())
    data[at : at + 8] = b"\xff" * 8
    path.write_bytes(data)
    verdict = verify_checkpoint(newest, deep=True)
    assert not verdict.is_resumable and {state.kind for state in verdict.damage.states} == {"exp_avg"}
    assert find_latest(run, deep=True).path == RunFolder(run).full()[2]
    told = call("salvage", run, "--deep", "--replace")
    out = run / "checkpoint-4"
    assert told["resume_from"] == str(out / CKPT) and (run / f"damaged-{newest.name}").exists()
    verdict = verify_checkpoint(out, deep=True)
    assert verdict.is_resumable and verdict.index is not None and verdict.index.global_step == 4
    assert 'an unpatched Lightning, without DeepSpeed:\n\n    trainer.fit(module, ckpt_path="this folder/' in (
        (out / "README.md").read_text()
    )


@pytest.mark.parametrize("name", ["lightning", "lightning-zero-2"])
def test_what_salvage_moves_aside_is_not_found_again(name: str, runs: Runs, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs[name].folder, run)
    newest, older = RunFolder(run).full()[4], RunFolder(run).full()[2]
    for path in [newest] if newest.is_file() else newest.rglob("*.pt"):
        path.write_bytes(path.read_bytes()[:1000])
    told = CliRunner().invoke(cli, ["salvage", str(run), "--replace"])
    assert f'resume with trainer.fit(module, ckpt_path="{display_name(older)}")' in told.output
    assert (run / f"damaged-{newest.name}").exists() and not newest.exists()
    found = find_latest(run)
    assert (found.path, found.passed_over) == (older, ())
    assert RunFolder(run).checkpoints() == [(2, older)]


def test_one_file_at_a_url(runs: Runs, tmp_path: Path) -> None:
    url = f"memory://{tmp_path}/run"
    fsspec.filesystem("memory").put(str(runs["lightning"].folder), url, recursive=True)
    newest = call("latest", url)["path"]
    assert newest == f"{url}/epoch=1-step=4.ckpt"
    for name in (newest, f"memory://{tmp_path}/run/epoch=0-step=2.ckpt"):
        forget_urls()
        told = call("inspect", name)
        assert (told["framework"], told["findings"]) == ("lightning", [])
        assert call("verify", name, "--deep")["verdict"] == RESUMABLE
    forget_urls()
    (recipe := tmp_path / "recipe.yaml").write_text(f"base_model: {newest}\n")
    out = Path(call("merge", recipe, tmp_path / "out")["out"])
    here = convert(runs.checkpoint("lightning", 4), tmp_path / "here")
    assert (out / CKPT).read_bytes() == (here / CKPT).read_bytes()
    call("convert", newest, f"{url}/checkpoint-4")
    assert fsspec.filesystem("memory").cat(f"{url}/checkpoint-4/{CKPT}") == (here / CKPT).read_bytes()


def test_several_optimizers_and_other_loaders_are_refused(runs: Runs, tmp_path: Path) -> None:
    path = tmp_path / "epoch=0-step=2.ckpt"
    shutil.copy(runs.checkpoint("lightning"), path)
    edited(lambda tree: tree["optimizer_states"].append({}))(path)
    with pytest.raises(UnsupportedCheckpoint, match="2 optimizers"):
        index_checkpoint(path)
    for name, options in (
        ("lightning", {"to": "trainer"}),
        ("lightning", {"stage": 2}),
        ("lightning-zero-2", {"stage": 0}),
    ):
        with pytest.raises(MismatchError, match="LightningModule"):
            convert(runs.checkpoint(name), tmp_path / "out", **options)


def test_a_folder_of_lightning_is_a_run(runs: Runs, tmp_path: Path) -> None:
    """`thin` makes what DeepSpeed has saved partial, and leaves single files as they are."""
    for name in ("lightning-zero-2", "lightning"):
        run = tmp_path / name
        shutil.copytree(runs[name].folder, run)
        call("thin", run, "--strategy", "full", "--keep-full-last", "1", "--yes")
        left = {"epoch=1-step=4.ckpt", *(["partial/step-00000002"] if name == "lightning-zero-2" else [])}
        assert {*folders(run)} == (left if name == "lightning-zero-2" else set())
        assert find_latest(run).path == run / "epoch=1-step=4.ckpt"
        made = compose(run, 2, tmp_path / f"{name}-2")
        wanted = index_checkpoint(runs.checkpoint(name))
        assert findings_of(made, deep=True) == []
        assert_same_states(index_checkpoint(made), wanted)
