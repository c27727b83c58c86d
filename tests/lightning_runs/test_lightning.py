"""Lightning's checkpoints: judged, composed, converted and resumed by Lightning itself.

A run's epochs end with a checkpoint, because Lightning begins the data anew when it resumes in the middle of one. From
a copy the losses are those of the straight run, to the last digit.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import fsspec  # noqa: E402
from click.testing import CliRunner  # noqa: E402

import llmtailor  # noqa: E402
from helpers.commands import forget_urls  # noqa: E402
from helpers.recipes import odd_layers_from  # noqa: E402
from helpers.states import read, same  # noqa: E402
from lightning_runs.conftest import Lightnings  # noqa: E402
from lightning_runs.runs import RUNS, SAVERS, needs_lightning  # noqa: E402
from lightning_runs.spec import NEWEST, Spec  # noqa: E402
from llmtailor.cli.main import cli  # noqa: E402
from llmtailor.codes import Code  # noqa: E402
from llmtailor.errors import MismatchError, UnsafePickle, UnsupportedCheckpoint  # noqa: E402
from llmtailor.findings import ERROR, NOTE  # noqa: E402
from llmtailor.formats.provenance import stated_attempt  # noqa: E402
from llmtailor.formats.registry import display_name, find_structure, index_checkpoint  # noqa: E402
from llmtailor.loaders.files import CKPT  # noqa: E402
from llmtailor.model.roles import WEIGHT, State  # noqa: E402
from llmtailor.recipe import Recipe  # noqa: E402
from llmtailor.runs.folder import RunFolder  # noqa: E402
from llmtailor.runs.scan import find_latest  # noqa: E402
from llmtailor.verify.inspect import inspect_checkpoint  # noqa: E402
from llmtailor.verify.verify import RESUMABLE, verify_checkpoint  # noqa: E402
from thin.scene import call, compose, folders  # noqa: E402
from trainings.harness import TrainingFailed, train  # noqa: E402

pytestmark = [pytest.mark.real, needs_lightning]
NOTES = {"ddp-groups": [(NOTE, Code.STATE_MISSING)]}
"""That a frozen param is taken for one"""


def findings_of(path: Path, *, deep: bool = False) -> list[tuple[str, Code]]:
    return [(one.severity, one.code) for one in verify_checkpoint(path, deep).findings]


def convert(source: Path, out: Path, **options: Any) -> Path:
    llmtailor.merge(Recipe("convert", "", source, (), None, None), out, llmtailor.Options(**options))
    return out


def ckpt_path(out: Path) -> Path:
    """What ``trainer.fit(ckpt_path=...)`` takes."""
    return out / CKPT if (out / CKPT).is_file() else out


@pytest.mark.parametrize("name", RUNS)
def test_what_lightning_saves_is_resumable(name: str, lightnings: Lightnings) -> None:
    for step in (2, 4):
        for is_deep in (False, True):
            assert findings_of(lightnings.checkpoint(name, step), deep=is_deep) == NOTES.get(name, [])
    assert find_latest(lightnings[name].folder).path == lightnings.checkpoint(name, 4)
    told = inspect_checkpoint(lightnings.checkpoint(name))
    assert (told["client"], told["global_step"], told["num_layers"]) == ("lightning", 2, 3)
    assert verify_checkpoint(lightnings.checkpoint(name), client="lightning").is_resumable
    assert not verify_checkpoint(lightnings.checkpoint(name), client="trainer").is_resumable
    assert call("latest", lightnings[name].folder)["path"] == str(lightnings.checkpoint(name, 4))


@pytest.mark.parametrize("name", RUNS)
def test_a_composite_holds_the_states_of_its_sources(name: str, lightnings: Lightnings, tmp_path: Path) -> None:
    sources = {step: lightnings.checkpoint(name, step) for step in (2, 4)}
    out = tmp_path / "checkpoint-4"
    llmtailor.merge(odd_layers_from(sources[2], sources[4], tmp_path), out, llmtailor.Options(world_size=3))
    indexes = {step: index_checkpoint(path) for step, path in sources.items()}
    made, structure = index_checkpoint(out), find_structure(indexes[4])
    for state in indexes[4].held:
        if state.kind == WEIGHT and not made.form.weights_are_states:
            continue
        source = indexes[2 if structure.part_of[state.param] == "layer 1" else 4]
        assert same(read(out, made.held[state]), read(source.root, source.held[state])), state
    assert (made.client, made.global_step, findings_of(out, deep=True)) == ("lightning", 4, [])
    if made.form.stage:
        assert ((out / "latest").read_text(), made.world_size) == ("checkpoint", 3)


@pytest.mark.parametrize(("name", "is_refused"), [("ddp", False), ("zero-2", True)])
def test_later_saves_are_said_to_be_refused_where_they_are(
    name: str, is_refused: bool, lightnings: Lightnings, tmp_path: Path
) -> None:
    """Under DeepSpeed all params make their steps together; without it, any may lag behind."""
    older, base = (lightnings.checkpoint(name, step) for step in (2, 4))
    groups = ["--groups", "layer"] if is_refused else []
    plan = call("merge", odd_layers_from(older, base, tmp_path), "--dry-run", *groups)
    assert {step for row in plan["optimizer_steps"] for step in [row["step"]]} == {2, 4}
    assert [notice["where"] for notice in plan["notices"]].count("optimizer") == is_refused


def test_what_is_no_state_is_copied(lightnings: Lightnings, tmp_path: Path) -> None:
    source = lightnings.checkpoint("ddp-groups")
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


@pytest.fixture(scope="module")
def resumed(
    request: pytest.FixtureRequest, lightnings: Lightnings, tmp_path_factory: pytest.TempPathFactory
) -> Mapping[str, Any]:
    """Resume from copies and conversions that the tests of this session ask for, and from composites of partial
    checkpoints, in one set of ranks for each number."""
    folder, place = tmp_path_factory.mktemp("converted"), tmp_path_factory.mktemp("resumed")
    batches: dict[int, list[Spec]] = {2: []}
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    for case in dict.fromkeys(item.callspec.params.get("case", "") for item in items):
        name, on, ranks = case.rpartition("-on-")
        if on:
            out = convert(lightnings.checkpoint(name), folder / case, world_size=int(ranks))
            spec = RUNS[name].resumed(ckpt_path(out), case, per_device_batch=6 // int(ranks))
            batches.setdefault(int(ranks), []).append(spec)
    for name, spec in SAVERS.items():
        for step in (1, 2):  # all that a run had saved which was killed then
            partial = f"partial/step-{step:08}"
            shutil.copytree(lightnings[name].folder / partial, place / name / partial)
        batches[2].append(spec.resumed(NEWEST, name))
    found: dict[str, Any] = {}
    for ranks, specs in batches.items():
        found |= train(specs, ranks, place, program="trainings.lightning")
    return found


@pytest.mark.parametrize("case", ["ddp-groups-on-2", "zero-2-on-2", *SAVERS])
def test_lightning_goes_on_as_if_nothing_had_happened(
    case: str, lightnings: Lightnings, resumed: Mapping[str, Any]
) -> None:
    straight = lightnings[case.removesuffix("-on-2")].losses
    assert resumed[case].losses == {step: loss for step, loss in straight.items() if step > 2}
    if case in SAVERS:  # one rank has composed it, for all
        assert [path.name for path in resumed[case].folder.glob("checkpoint-*")] == ["checkpoint-2"]


@pytest.mark.long
@pytest.mark.parametrize("case", ["ddp-on-1", "zero-2-on-1", "ddp-on-3", "zero-3-on-3"])
def test_lightning_goes_on_with_other_ranks(case: str, lightnings: Lightnings, resumed: Mapping[str, Any]) -> None:
    """The same batch is summed up in another order."""
    straight = lightnings[case[:-5]].losses
    assert resumed[case].losses == pytest.approx({step: loss for step, loss in straight.items() if step > 2}, rel=1e-5)


@pytest.mark.parametrize("name", SAVERS)
def test_partial_checkpoints_hold_what_lightning_saves(name: str, lightnings: Lightnings, tmp_path: Path) -> None:
    run = lightnings[name].folder
    for step in (1, 2, 3, 4):
        partial = run / "partial" / f"step-{step:08}"
        assert findings_of(partial, deep=True) == [] and index_checkpoint(partial).client == "lightning"
    out, stock = compose(run, 4, tmp_path / "checkpoint-4"), lightnings.checkpoint(name, 4)
    assert findings_of(out, deep=True) == []
    attempt = stated_attempt(stock)
    assert attempt is not None and stated_attempt(out) == attempt
    composed, saved = index_checkpoint(out), index_checkpoint(stock)
    for state, held in saved.held.items():
        if state.kind != WEIGHT:
            assert same(read(out, composed.held[state]), read(stock, held)), state
    if not saved.form.stage:
        one, two = (torch.load(path, weights_only=False) for path in (out / CKPT, stock))
        assert one.keys() == two.keys() and [*one["state_dict"]] == [*two["state_dict"]]
        for key in ("loops", "lr_schedulers", "hyper_parameters", "global_step", "epoch"):
            assert one[key] == two[key]


def forget_full(run: Path) -> None:
    for path in run.glob("*.ckpt"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.parametrize(
    "name", ["ddp", pytest.param("zero-2", marks=pytest.mark.long), pytest.param("zero-3", marks=pytest.mark.long)]
)
def test_a_killed_training_goes_on_from_partial_checkpoints(name: str, lightnings: Lightnings, tmp_path: Path) -> None:
    spec = replace(RUNS[name], name="run", saver="parity", dies_at=3)
    with pytest.raises(TrainingFailed, match="rank"):
        train([spec], 2, tmp_path, program="trainings.lightning")
    forget_full(tmp_path / "run")
    call("merge", "--run", tmp_path / "run", "--at", 2)
    out = tmp_path / "run" / "checkpoint-2"
    assert findings_of(out, deep=True) == []
    again = spec.resumed(ckpt_path(out), "run", dies_at=0)
    (run,) = train([again], 2, tmp_path, program="trainings.lightning").values()
    straight = lightnings[name].losses
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
def test_a_damage_is_told(damage: Callable[[Path], object], code: Code, lightnings: Lightnings, tmp_path: Path) -> None:
    path = tmp_path / "epoch=0-step=2.ckpt"
    shutil.copy(lightnings.checkpoint("ddp"), path)
    damage(path)
    assert (ERROR, code) in findings_of(path)


@pytest.mark.parametrize("is_composite", [False, True])
def test_a_byte_of_a_tensor_is_told_and_salvaged(is_composite: bool, lightnings: Lightnings, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for step in (2, 4):
        source = lightnings.checkpoint("ddp", step)
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


@pytest.mark.parametrize("name", ["ddp", "zero-2"])
def test_what_salvage_moves_aside_is_not_found_again(name: str, lightnings: Lightnings, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(lightnings[name].folder, run)
    newest, older = RunFolder(run).full()[4], RunFolder(run).full()[2]
    for path in [newest] if newest.is_file() else newest.rglob("*.pt"):
        path.write_bytes(path.read_bytes()[:1000])
    told = CliRunner().invoke(cli, ["salvage", str(run), "--replace"])
    assert f'resume with trainer.fit(module, ckpt_path="{display_name(older)}")' in told.output
    assert (run / f"damaged-{newest.name}").exists() and not newest.exists()
    found = find_latest(run)
    assert (found.path, found.passed_over) == (older, ())
    assert RunFolder(run).checkpoints() == [(2, older)]


def test_one_file_at_a_url(lightnings: Lightnings, tmp_path: Path) -> None:
    url = f"memory://{tmp_path}/run"
    fsspec.filesystem("memory").put(str(lightnings["ddp"].folder), url, recursive=True)
    newest = call("latest", url)["path"]
    assert newest == f"{url}/epoch=1-step=4.ckpt"
    for name in (newest, f"memory://{tmp_path}/run/epoch=0-step=2.ckpt"):
        forget_urls()
        told = call("inspect", name)
        assert (told["client"], told["findings"]) == ("lightning", [])
        assert call("verify", name, "--deep")["verdict"] == RESUMABLE
    forget_urls()
    (recipe := tmp_path / "recipe.yaml").write_text(f"base_model: {newest}\n")
    out = Path(call("merge", recipe, tmp_path / "out")["out"])
    here = convert(lightnings.checkpoint("ddp", 4), tmp_path / "here")
    assert (out / CKPT).read_bytes() == (here / CKPT).read_bytes()
    call("convert", newest, f"{url}/checkpoint-4")
    assert fsspec.filesystem("memory").cat(f"{url}/checkpoint-4/{CKPT}") == (here / CKPT).read_bytes()


def test_several_optimizers_and_other_loaders_are_refused(lightnings: Lightnings, tmp_path: Path) -> None:
    path = tmp_path / "epoch=0-step=2.ckpt"
    shutil.copy(lightnings.checkpoint("ddp"), path)
    edited(lambda tree: tree["optimizer_states"].append({}))(path)
    with pytest.raises(UnsupportedCheckpoint, match="2 optimizers"):
        index_checkpoint(path)
    for name, options in (("ddp", {"to": "trainer"}), ("ddp", {"stage": 2}), ("zero-2", {"stage": 0})):
        with pytest.raises(MismatchError, match="LightningModule"):
            convert(lightnings.checkpoint(name), tmp_path / "out", **options)


def test_code_in_a_file_is_never_run(lightnings: Lightnings, tmp_path: Path) -> None:
    class Harm:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return __import__("os").system, (f"touch {tmp_path / 'ran'}",)

    path = tmp_path / "epoch=0-step=2.ckpt"
    shutil.copy(lightnings.checkpoint("ddp"), path)
    edited(lambda tree: tree["callbacks"].update(harm=Harm()))(path)
    with pytest.raises(UnsafePickle):
        convert(path, tmp_path / "out")
    assert not verify_checkpoint(path).is_resumable and not (tmp_path / "ran").exists()


def test_a_folder_of_lightning_is_a_run(lightnings: Lightnings, tmp_path: Path) -> None:
    """`thin` makes what DeepSpeed has saved partial, and leaves single files as they are."""
    for name in ("zero-2", "ddp"):
        run = tmp_path / name
        shutil.copytree(lightnings[name].folder, run)
        call("thin", run, "--strategy", "full", "--keep-full-last", "1", "--yes")
        left = {"epoch=1-step=4.ckpt", *(["partial/step-00000002"] if name == "zero-2" else [])}
        assert {*folders(run)} == (left if name == "zero-2" else set())
        assert find_latest(run).path == run / "epoch=1-step=4.ckpt"
        made = compose(run, 2, tmp_path / f"{name}-2")
        wanted = index_checkpoint(lightnings.checkpoint(name))
        assert findings_of(made, deep=True) == []
        found = index_checkpoint(made)
        for state, held in wanted.held.items():
            assert same(read(made, found.held[state]), read(wanted.root, held)), state
