"""Saves with the masters of all parts and the moments of some, held against copies of the live tensors."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import llmtailor
from helpers.cases import mostly_long
from helpers.commands import call
from helpers.files import flip
from llmtailor.checkpoint.lineage import Ledger, RunCheckpoint, newer_masters, sources_at, usable_at
from llmtailor.compose.plan import explain_recipe, plan_merge
from llmtailor.errors import SourceError
from llmtailor.formats.registry import find_structure, index_checkpoint
from llmtailor.model.parts import Part
from llmtailor.recipe.strategies import StrategyOptions
from llmtailor.runs.choose import choose_for_run
from llmtailor.runs.retention import find_reachable, needed
from llmtailor.runs.scan import describe_checkpoint
from llmtailor.verify.inspect import describe
from llmtailor.verify.verify import verify_checkpoint
from report.parsing import Page
from saving.loop import Loop, check_states, fold, manifests


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Saves at steps 2 to 8. Never write into its folder."""
    return Loop(tmp_path_factory.mktemp("moments") / "run", policy="moments_in_turn:3").trained(4, 2)


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained.run, tmp_path / "run")


def newest(run: Path, at: int) -> tuple[dict[str, int], dict[str, int]]:
    """Return the steps of the newest masters and of the newest moments of each part."""
    masters, moments = {}, {}
    for step, found in manifests([run], at).items():
        whole = [one["part"] for one in found["parts"]]
        moments |= dict.fromkeys(whole, step)
        masters |= dict.fromkeys([*whole, *(one["part"] for one in found.get("masters", ()))], step)
    return masters, moments


@pytest.mark.parametrize("num_experts", mostly_long([0, 4], 4))
def test_a_composite_has_the_newest_masters_and_the_newest_moments(num_experts, tmp_path):
    options = {"experts": "parts"} if num_experts else {}
    run = tmp_path / "run"
    loop = Loop(run, hidden=16, num_experts=num_experts, policy="moments_in_turn:3", **options).start()
    loop.make_saves(4, 2)
    for step in (4, 6, 8):
        out = tmp_path / str(step)
        call("merge", "--run", run, "--at", step, out)
        check_states(out, loop.wanted(step))
        masters, moments = newest(run, step)
        assert {*masters.values()} == {step} and len({*moments.values()}) > 1
        rows = json.loads((out / "llmtailor.json").read_text())["parts"]
        assert {row["step"] for row in rows if not row["only"]} == {step}
        assert {row["step"] for row in rows if row["only"] == "moments"} == {*moments.values()} - {step}
        assert verify_checkpoint(out, deep=True).is_intact
    whole, *others = (sum(one["num_bytes"] for one in found["bundles"]) for found in manifests([run]).values())
    assert all(size < 0.75 * whole for size in others)
    assert not any("base" in one for found in manifests([run]).values() for one in found.get("masters", ()))

    text = call("recipe", run, "--at", 8)
    assert "only: moments" in text.stdout
    (tmp_path / "recipe.yaml").write_text(text.stdout)
    (tmp_path / "normal.yaml").write_text(explain_recipe(tmp_path / "recipe.yaml", tmp_path))
    for recipe in (tmp_path / "recipe.yaml", tmp_path / "normal.yaml"):
        out = tmp_path / recipe.stem
        call("merge", recipe, out)
        check_states(out, loop.wanted(8))


def test_it_goes_on_after_a_resume_and_after_another_policy(tmp_path):
    """Masters of a save before may be newer than the part's own last save, and must stay as long as they are."""
    loop, wanted = Loop(tmp_path, policy="moments_in_turn:3").start(), {}
    loop.make_saves(2, 2)
    loop.start_again("moments_in_turn:3")
    loop.make_saves(1, 2)
    loop.start_again("round_robin:5", keep_composable=1)
    fold(loop.truth, manifests([tmp_path]), wanted)
    for _ in range(2):
        loop.make_saves(1, 2)
        fold(loop.truth, {loop.step: loop.manifest(loop.step)}, wanted)
    loop.saver.close()
    masters, moments = newest(tmp_path, 10)
    assert len({*masters.values()}) > 1
    assert any(masters[part] > moments[part] for part in masters if masters[part] < 10)
    call("merge", "--run", tmp_path, tmp_path / "out")
    check_states(tmp_path / "out", wanted)


ABC = tuple(map(Part, "abc"))


def saved(*saves: tuple[int, str, str]) -> tuple[list[RunCheckpoint], Ledger]:
    """Return saves of a run with the parts a, b and c: their steps, what they hold whole, and the masters alone."""
    ledger, found = Ledger("L"), []
    for step, whole, masters in saves:
        ledger = ledger.after(step, [*map(Part, whole)], ABC)
        found.append(RunCheckpoint.saved(Path(str(step)), ledger, [*map(Part, masters)]))
    return found, ledger


def test_saves_with_the_newest_masters_are_kept():
    saves, ledger = saved((1, "abc", ""), (2, "a", "bc"), (3, "b", "ac"), (4, "a", ""))
    sources = sources_at(saves, 4, ABC)
    assert {part: one.step for part, one in sources.items()} == {"a": 4, "b": 3, "c": 1}
    masters = newer_masters(usable_at(saves, 4), sources)
    assert {part: one.step for part, one in masters.items()} == {"c": 3}
    assert needed(saves, ledger, 1) == {1, 3, 4}
    saves, ledger = saved((1, "abc", ""), (2, "a", "bc"), (3, "a", ""))
    assert needed(saves, ledger, 1) == {1, 2, 3}
    assert {one.step for one in find_reachable(saves, ABC, 1).needed} == {1, 2, 3}


def test_masters_are_as_old_as_a_thinned_composite_says():
    ledger = Ledger("L").after(1, ABC, ABC).after(8, ABC[1:2], ABC)
    old = RunCheckpoint.saved(Path("8"), ledger, ABC[::2])
    thinned = replace(
        old, part_steps=dict(zip(ABC, (4, 8, 4), strict=True)), master_steps=dict(zip(ABC, (4, 8, 7), strict=True))
    )
    full = RunCheckpoint(Path("6"), 6, None)
    found = newer_masters([thinned, full], dict.fromkeys(ABC[::2], full))
    assert found == {"c": thinned}


def test_a_manifest_that_lists_other_masters_is_refused(run):
    folder = run / "partial" / "step-00000004"
    content = json.loads((folder / "manifest.json").read_text())
    assert content["schema"] == "llmtailor.partial/2" and content["masters"]
    index_checkpoint(folder)
    first, *rest = content["masters"]
    for broken in (
        {"masters": rest},
        {"masters": [*content["masters"], first]},
        {"masters": [*content["masters"], content["parts"][0]]},
        {"parts": [*content["parts"], first | {"why": "", "num_bytes": 0}], "masters": rest},
        {"schema": "llmtailor.partial/1"},
        {"masters": 3},
    ):
        (folder / "manifest.json").write_text(json.dumps(content | broken))
        with pytest.raises(SourceError):
            index_checkpoint(folder)


def test_what_a_save_holds_is_told(trained):
    base, save = (trained.run / "partial" / f"step-0000000{step}" for step in (2, 4))
    assert "the masters alone of 4: " in call("verify", save).stdout
    assert "the masters alone" not in call("verify", base).stdout
    told = call("inspect", save).stdout
    assert told.count("without moments") == 4 and "not held" not in told


def test_recipes_can_take_moments_alone(tmp_path):
    """From any checkpoint, also of whole ones; what follows in the recipe wins."""
    loop = Loop(tmp_path / "run", policy="full").trained(3, 2)
    for step in (2, 4, 6):
        loop.compose(step, tmp_path / str(step))
    (tmp_path / "r.yaml").write_text(
        "base_model: '6'\nparts:\n"
        "- {from: '2', select: all, only: moments}\n"
        "- {from: '4', select: 1}\n"
        "- {from: '4', select: norm, only: moments}\n"
    )
    call("merge", tmp_path / "r.yaml", tmp_path / "out")

    def step_of(name: str, kind: str) -> int:
        if ".layers.1." in name:
            return 4
        return 6 if kind == "master" else 4 if name == "model.norm.weight" else 2

    wanted = {key: loop.truth[step_of(*key)][key[0]][key[1]] for key in loop.wanted(6)}
    check_states(tmp_path / "out", wanted)


@pytest.mark.parametrize(
    ("entry", "wrong"),
    [
        ("{from: a, select: 1, only: weights}", "only 'weights' is unknown"),
        ("{from: a, select: 1, only: [moments]}", "expected"),
        ("{average: [{from: a, weight: 1}, {from: b, weight: 1}], select: 1, only: moments}", "unknown key 'only'"),
    ],
)
def test_what_only_can_not_be(entry, wrong, tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
    (tmp_path / "r.yaml").write_text(f"base_model: a\nparts: [{entry}]\n")
    assert wrong in call("merge", tmp_path / "r.yaml", tmp_path / "out", code=3).stderr


def test_thin_keeps_masters_and_moments_in_turn(tmp_path):
    """Of full checkpoints, the older ones become what the saver would have written."""
    loop, stock = Loop(tmp_path / "saved", policy="full").start(), tmp_path / "stock"
    loop.make_saves(4, 2)
    loop.saver.close()
    stock.mkdir()
    for step in (2, 4, 6, 8):
        loop.compose(step, stock / f"checkpoint-{step}")
    done = call("thin", stock, "--strategy", "moments_in_turn:3", "--yes")
    assert done.stdout.count("; the masters of the others") == 2
    assert sorted(one.name for one in stock.glob("checkpoint-*")) == ["checkpoint-8"]
    loop.run = stock
    for step in (4, 6):
        loop.check(step, tmp_path / str(step))
        masters, moments = newest(stock, step)
        assert {*masters.values()} == {step} and len({*moments.values()}) > 1


def test_salvage_takes_the_newest_intact_masters(trained, run):
    call("salvage", run)
    check_states(run / "salvaged-checkpoint-8", trained.wanted(8))
    (shard,) = (run / "partial" / "step-00000008").glob("rank-*")
    flip(shard, -5000)
    assert "layer 0 moments" in call("salvage", run, "--deep").stdout
    check_states(run / "salvaged-checkpoint-6", trained.wanted(6))
    masters, moments = newest(run, 6)
    assert {*masters.values()} == {6} and len({*moments.values()}) == 3


@pytest.mark.parametrize("policy", mostly_long(["parity", "moments_in_turn:2"], "moments_in_turn:2"))
def test_composites_can_share_blocks_with_saves(policy, tmp_path):
    """Tensors lie in a save as the optimizer has them, at the same place in a block: all but weight files' heads."""
    loop = Loop(tmp_path, hidden=512, layers=2, policy=policy, background=False).trained(2, 2)
    plan = plan_merge(choose_for_run(tmp_path, 4, StrategyOptions("latest"))[0], tmp_path / "out").plan
    large = sum(4 * one.numel() for one in loop.model.parameters() if 4 * one.numel() > 1 << 18)
    assert plan.shareable_bytes > 0.95 * 2 * large  # of moments; the weights are in one file, one after another


def test_a_composite_is_not_composed_again(run, tmp_path):
    """Its masters are newer than its moments, which it says, and what is made of it says so too."""
    call("merge", "--run", run)
    again = call("merge", "--run", run)
    assert "nothing to merge" in again.stdout + again.stderr
    composite = index_checkpoint(run / "checkpoint-8")
    masters, moments = newest(run, 8)
    assert dict(composite.composite.states) == moments and dict(composite.composite.masters) == masters
    facts = {part["part"]: part for part in describe(composite)["parts"]}
    older = {part for part, step in moments.items() if step < masters[part]}
    assert older and {part: one["masters_step"] for part, one in facts.items()} == {
        part: masters[part] if part in older else None for part in facts
    }
    call("convert", run / "checkpoint-8", tmp_path / "other", "--groups", "layer")
    other, own = index_checkpoint(tmp_path / "other").composite, composite.composite
    assert (other.states, other.masters) == (own.states, own.masters)
    structure = find_structure(composite)
    found = describe_checkpoint(composite, structure)
    saves = [describe_checkpoint(index_checkpoint(one), structure) for one in run.glob("partial/step-*")]
    sources = sources_at([found, *saves], 8, [*map(Part, masters)])
    assert {*sources.values()} == {found} and not newer_masters([found, *saves], sources)

    part = min(older, key=list(facts).index)

    def row(*words: object) -> list[str]:
        shown = call(*words, code=10 if words[0] == "diff" else 0).stdout.splitlines()
        return next(line for line in shown if line.startswith(f"{part}  ")).removeprefix(part).split()

    assert f" {masters[part]} {moments[part]} " in " ".join(row("inspect", run / "checkpoint-8"))
    call("merge", "--run", run, "--at", 6, tmp_path / "6")
    before = newest(run, 6)
    steps = [before[0][part], masters[part], before[1][part], moments[part]]
    assert row("diff", tmp_path / "6", run / "checkpoint-8")[:4] == list(map(str, steps))
    assert row("diff", run / "checkpoint-8", run / "partial" / "step-00000008")[:4] == ["8", "8", "-", "-"]


def test_a_report_tells_ages_of_masters_and_moments_apart(run, tmp_path):
    """And lists a checkpoint once, however the run's folder is named."""
    masters, moments = newest(run, 8)
    for is_composed in (False, True):
        if is_composed:
            call("merge", "--run", run)
        call("report", "run", "--force", cwd=tmp_path)
        page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
        names = page.table("checkpoint", "verdict").column("checkpoint")
        assert names and sorted(names) == sorted(set(names))
        assert "steps since the moments of a part were saved" in page.text
        ages = page.table("part", "saves")
        shown = {row[0]: (row[ages.head.index("masters at step")], row[2]) for row in ages.rows}
        assert shown == {part: (str(masters[part]), str(moments[part])) for part in masters}
        oldest = [part for part in moments if moments[part] == min(moments.values())]
        assert f"{8 - moments[oldest[0]]} steps older: {oldest[0]} moments" in page.text
    told = dict(zip(*map(page.table("part", "source").column, ("part", "step")), strict=True))
    assert told[oldest[0]] == f"{moments[oldest[0]]} (masters 8)"


def test_the_updates_that_moments_lack_are_counted_over_failures(tmp_path):
    """In a form with one count of Adam's steps for all params; scaled moments lack none."""

    def lacking(checkpoint: Path) -> dict[str, int]:
        rows = json.loads(call("inspect", checkpoint, "--json").stdout)["parts"]
        return {row["part"]: row["updates_missed"] for row in rows if row["updates_missed"]}

    def compose(name: str, *words: object) -> Path:
        told = call("merge", "--run", tmp_path / "run", tmp_path / name, "--to", "deepspeed", *words)
        assert ("moments are of up to" in told.stderr) == (words == ("--step", "base"))
        return tmp_path / name

    loop, policy = Loop(tmp_path / "run", policy="moments_in_turn:3").start(), "moments_in_turn:3"
    loop.make_saves(4, 2)
    loop.saver.close()
    first = compose("first", "--step", "base")
    old = {part: 8 - step for part, step in newest(tmp_path / "run", 8)[1].items() if step < 8}
    assert lacking(first) == old and set(old.values()) == {2, 4}
    assert f"lack up to {max(old.values())} updates that Adam counts" in call("inspect", first).stdout
    found = llmtailor.attest(first, model=loop.model, optimizer=loop.optimizer)
    assert "second moments lack up to 4 updates that Adam counts" in found.notes
    assert lacking(compose("rebased")) == {}

    loop.saver = loop._new_saver(policy=policy)
    loop.saver.start(8, resumed_from=first)
    report = loop.make_saves(2, 2)
    loop.saver.close()
    assert lacking(tmp_path / "run" / "partial" / "step-00000012") == old and report.updates_missed == 4
    moments = newest(tmp_path / "run", 12)[1]
    second = compose("second", "--step", "base")
    wanted = {part: old.get(part, 0) + 12 - step for part, step in moments.items()}
    assert lacking(second) == {part: number for part, number in wanted.items() if number}
    assert lacking(compose("all rebased")) == {}
