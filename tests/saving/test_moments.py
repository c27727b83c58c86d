"""Saves with the masters of all parts and the moments of some, held against copies of the live tensors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors.torch import load_file  # noqa: E402

from helpers.cases import mostly_long  # noqa: E402
from helpers.commands import run_here  # noqa: E402
from llmtailor.checkpoint.lineage import Ledger, RunCheckpoint, newer_masters, sources_at, usable_at  # noqa: E402
from llmtailor.compose.plan import explain_recipe, plan_merge  # noqa: E402
from llmtailor.errors import SourceError  # noqa: E402
from llmtailor.formats.partial.manifest import read_manifest  # noqa: E402
from llmtailor.formats.registry import find_structure, index_checkpoint  # noqa: E402
from llmtailor.model.parts import Part  # noqa: E402
from llmtailor.recipe.strategies import StrategyOptions  # noqa: E402
from llmtailor.runs.gc import find_reachable, needed  # noqa: E402
from llmtailor.runs.scan import choose_for_run, describe_checkpoint  # noqa: E402
from llmtailor.verify.inspect import describe  # noqa: E402
from llmtailor.verify.verify import verify_checkpoint  # noqa: E402
from report.parsing import Page  # noqa: E402
from saving.loop import Loop  # noqa: E402
from saving.test_experts import saving, train  # noqa: E402

KINDS = ("master", "exp_avg", "exp_avg_sq")


def manifests(run: Path, until: int) -> dict[int, dict]:
    folders = sorted(run.glob("partial/step-????????"))
    return {
        int(one.name[5:]): json.loads((one / "manifest.json").read_text())
        for one in folders
        if int(one.name[5:]) <= until
    }


def newest(run: Path, at: int) -> tuple[dict[str, int], dict[str, int]]:
    """Return the steps of the newest masters and of the newest moments of each part."""
    masters, moments = {}, {}
    for step, found in manifests(run, at).items():
        whole = [one["part"] for one in found["parts"]]
        moments |= dict.fromkeys(whole, step)
        masters |= dict.fromkeys([*whole, *(one["part"] for one in found.get("masters", ()))], step)
    return masters, moments


def check(loop: Loop, at: int, out: Path) -> None:
    """Demand of each param, and of each expert in it, the newest masters and the newest moments."""
    masters, moments = newest(loop.run, at)
    base = manifests(loop.run, at)
    pieces = [
        (name, one["part"], run)
        for one in base[min(base)]["parts"]
        for name, run in [*dict.fromkeys(one["params"]).items(), *one.get("pieces", {}).items()]
    ]
    weights, optimizer = load_file(out / "model.safetensors"), torch.load(out / "optimizer.pt")
    names = [name for group in optimizer["param_groups"] for name in group["lt_params"]]
    assert {name for name, _, _ in pieces} == {*names}
    for name, part, run in pieces:
        found = {"master": weights[name], **optimizer["state"][names.index(name)]}
        for kind in KINDS:
            truth = loop.truth[(masters if kind == "master" else moments)[part]][name][kind]
            begin, end = run or (0, truth.numel())
            assert torch.equal(found[kind].reshape(-1)[begin:end], truth.reshape(-1)[begin:end]), (at, part, name, kind)


@pytest.mark.parametrize("num_experts", mostly_long([0, 4], 4))
def test_a_composite_has_the_newest_masters_and_the_newest_moments(num_experts, tmp_path):
    options = {"experts": "parts"} if num_experts else {}
    run = tmp_path / "run"
    loop = Loop(run, hidden=16, num_experts=num_experts, policy="moments_in_turn:3", **options).start()
    train(loop, 4)
    for step in (4, 6, 8):
        out = tmp_path / str(step)
        done = run_here("merge", "--run", run, "--at", step, out)
        assert done.returncode == 0, done.stderr
        check(loop, step, out)
        masters, moments = newest(run, step)
        assert {*masters.values()} == {step} and len({*moments.values()}) > 1
        rows = json.loads((out / "llmtailor.json").read_text())["parts"]
        assert {row["step"] for row in rows if not row["only"]} == {step}
        assert {row["step"] for row in rows if row["only"] == "moments"} == {*moments.values()} - {step}
        assert verify_checkpoint(out, deep=True).is_intact
    whole, *others = (sum(one["num_bytes"] for one in found["bundles"]) for found in manifests(run, 8).values())
    assert all(size < 0.75 * whole for size in others)

    text = run_here("recipe", run, "--at", 8)
    assert text.returncode == 0, text.stderr
    assert "only: moments" in text.stdout
    (tmp_path / "recipe.yaml").write_text(text.stdout)
    (tmp_path / "normal.yaml").write_text(explain_recipe(tmp_path / "recipe.yaml", tmp_path))
    for recipe in (tmp_path / "recipe.yaml", tmp_path / "normal.yaml"):
        out = tmp_path / recipe.stem
        assert run_here("merge", recipe, out).returncode == 0
        check(loop, 8, out)


def test_it_goes_on_after_a_resume_and_after_another_policy(tmp_path):
    """Masters of a save before may be newer than the part's own last save, and must stay as long as they are."""
    loop = Loop(tmp_path, policy="moments_in_turn:3").start()
    train(loop, 2)
    saving(loop, "moments_in_turn:3")
    train(loop, 1)
    saving(loop, "round_robin:5", keep_composable=1)
    train(loop, 2)
    loop.saver.close()
    masters, moments = newest(tmp_path, 10)
    assert len({*masters.values()}) > 1
    assert any(masters[part] > moments[part] for part in masters if masters[part] < 10)
    done = run_here("merge", "--run", tmp_path, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    check(loop, 10, tmp_path / "out")


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


def test_a_manifest_that_lists_other_masters_is_refused(tmp_path):
    loop = Loop(tmp_path, policy="moments_in_turn:3").start()
    train(loop, 2)
    loop.saver.close()
    folder = tmp_path / "partial" / "step-00000004"
    content = json.loads((folder / "manifest.json").read_text())
    assert content["schema"] == "llmtailor.partial/2" and read_manifest(folder, "").masters
    index_checkpoint(folder)
    first, *rest = content["masters"]
    for broken in (
        {"masters": rest},
        {"masters": [*content["masters"], first]},
        {"masters": [*content["masters"], content["parts"][0]]},
        {
            "parts": [*content["parts"], content["masters"][0] | {"why": "", "num_bytes": 0}],
            "masters": content["masters"][1:],
        },
        {"schema": "llmtailor.partial/1"},
        {"masters": 3},
    ):
        (folder / "manifest.json").write_text(json.dumps(content | broken))
        with pytest.raises(SourceError):
            index_checkpoint(folder)


def test_what_a_save_holds_is_told(tmp_path):
    loop = Loop(tmp_path, policy="moments_in_turn:3").start()
    train(loop, 2)
    loop.saver.close()
    done = run_here("verify", tmp_path / "partial" / "step-00000004")
    assert done.returncode == 0, done.stderr
    assert "the masters alone of 4: " in done.stdout
    assert "the masters alone" not in run_here("verify", tmp_path / "partial" / "step-00000002").stdout


def test_recipes_can_take_moments_alone(tmp_path):
    """From any checkpoint, also of whole ones; what follows in the recipe wins."""
    loop = Loop(tmp_path / "run", policy="full").start()
    train(loop, 3)
    loop.saver.close()
    for step in (2, 4, 6):
        assert run_here("merge", "--run", tmp_path / "run", "--at", step, tmp_path / str(step)).returncode == 0
    (tmp_path / "r.yaml").write_text(
        "base_model: '6'\nparts:\n"
        "- {from: '2', select: all, only: moments}\n"
        "- {from: '4', select: 1}\n"
        "- {from: '4', select: norm, only: moments}\n"
    )
    done = run_here("merge", tmp_path / "r.yaml", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    weights, optimizer = (
        load_file(tmp_path / "out" / "model.safetensors"),
        torch.load(tmp_path / "out" / "optimizer.pt"),
    )
    names = [name for group in optimizer["param_groups"] for name in group["lt_params"]]
    for number, name in enumerate(names):
        master, moments = (4, 4) if ".layers.1." in name else (6, 4 if name == "model.norm.weight" else 2)
        assert torch.equal(weights[name], loop.truth[master][name]["master"]), name
        for kind in KINDS[1:]:
            assert torch.equal(optimizer["state"][number][kind], loop.truth[moments][name][kind]), name


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
    done = run_here("merge", tmp_path / "r.yaml", tmp_path / "out")
    assert done.returncode == 3 and wrong in done.stderr, done.stderr


def test_thin_keeps_masters_and_moments_in_turn(tmp_path):
    """Of full checkpoints, the older ones become what the saver would have written."""
    loop, stock = Loop(tmp_path / "saved", policy="full").start(), tmp_path / "stock"
    stock.mkdir()
    train(loop, 4)
    loop.saver.close()
    for step in (2, 4, 6, 8):
        done = run_here("merge", "--run", loop.run, "--at", step, stock / f"checkpoint-{step}")
        assert done.returncode == 0, done.stderr
    done = run_here("thin", stock, "--strategy", "moments_in_turn:3", "--yes")
    assert done.returncode == 0, done.stderr + done.stdout
    assert done.stdout.count("; the masters of the others") == 2
    assert sorted(one.name for one in stock.glob("checkpoint-*")) == ["checkpoint-8"]
    loop.run = stock
    for step in (4, 6):
        assert run_here("merge", "--run", stock, "--at", step, tmp_path / str(step)).returncode == 0
        check(loop, step, tmp_path / str(step))
        masters, moments = newest(stock, step)
        assert {*masters.values()} == {step} and len({*moments.values()}) > 1


def test_salvage_takes_the_newest_intact_masters(tmp_path):
    run = tmp_path / "run"
    loop = Loop(run, policy="moments_in_turn:3").start()
    train(loop, 4)
    loop.saver.close()
    done = run_here("salvage", run)
    assert done.returncode == 0, done.stderr
    check(loop, 8, run / "salvaged-checkpoint-8")
    (shard,) = (run / "partial" / "step-00000008").glob("rank-*")
    data = bytearray(shard.read_bytes())
    data[-5000] ^= 255
    shard.write_bytes(data)
    done = run_here("salvage", run, "--deep")
    assert done.returncode == 0, done.stderr
    assert "layer 0 moments" in done.stdout
    check(loop, 6, run / "salvaged-checkpoint-6")
    masters, moments = newest(run, 6)
    assert {*masters.values()} == {6} and len({*moments.values()}) == 3


def test_inspect_tells_what_is_without_moments(tmp_path):
    loop = Loop(tmp_path, policy="moments_in_turn:3").start()
    train(loop, 2)
    loop.saver.close()
    done = run_here("inspect", tmp_path / "partial" / "step-00000004")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("without moments") == 4 and "not held" not in done.stdout


@pytest.mark.parametrize("policy", mostly_long(["parity", "moments_in_turn:2"], "moments_in_turn:2"))
def test_composites_can_share_blocks_with_saves(policy, tmp_path):
    """Tensors lie in a save as the optimizer has them, at the same place in a block: all but weight files' heads."""
    loop = Loop(tmp_path, hidden=512, layers=2, policy=policy, background=False).start()
    train(loop, 2)
    loop.saver.close()
    plan = plan_merge(choose_for_run(tmp_path, 4, StrategyOptions("latest"))[0], tmp_path / "out").plan
    large = sum(4 * one.numel() for one in loop.model.parameters() if 4 * one.numel() > 1 << 18)
    assert plan.shareable_bytes > 0.95 * 2 * large  # of moments; the weights are in one file, one after another


def test_a_composite_is_not_composed_again(tmp_path):
    """Its masters are newer than its moments, which it says, and what is made of it says so too."""
    run = tmp_path / "run"
    loop = Loop(run, policy="moments_in_turn:3").start()
    train(loop, 3)
    loop.saver.close()
    assert run_here("merge", "--run", run).returncode == 0
    again = run_here("merge", "--run", run)
    assert again.returncode == 0 and "nothing to merge" in again.stdout + again.stderr
    composite = index_checkpoint(run / "checkpoint-6")
    masters, moments = newest(run, 6)
    assert dict(composite.composite.states) == moments and dict(composite.composite.masters) == masters
    facts = {part["part"]: part for part in describe(composite)["parts"]}
    older = {part for part, step in moments.items() if step < masters[part]}
    assert older and {part: one["masters_step"] for part, one in facts.items()} == {
        part: masters[part] if part in older else None for part in facts
    }
    part = min(older, key=list(facts).index)
    row = next(row for row in run_here("inspect", run / "checkpoint-6").stdout.splitlines() if row.startswith(part))
    assert f"{masters[part]}  {moments[part]:>10}  " in row, row
    done = run_here("convert", run / "checkpoint-6", tmp_path / "other", "--groups", "layer")
    assert done.returncode == 0, done.stderr
    other = index_checkpoint(tmp_path / "other")
    assert (other.composite.states, other.composite.masters) == (
        composite.composite.states,
        composite.composite.masters,
    )
    found = describe_checkpoint(composite, find_structure(composite))
    saves = [
        describe_checkpoint(index_checkpoint(one), find_structure(composite)) for one in run.glob("partial/step-*")
    ]
    sources = sources_at([found, *saves], 6, [*masters])
    assert {*sources.values()} == {found} and not newer_masters([found, *saves], sources)
    assert run_here("merge", "--run", run, "--at", 4, tmp_path / "4").returncode == 0
    shown = run_here("diff", tmp_path / "4", run / "checkpoint-6").stdout
    row = next(row for row in shown.splitlines() if row.startswith(f"{part}  "))
    before = newest(run, 4)
    steps = [before[0][part], masters[part], before[1][part], moments[part]]
    assert row.removeprefix(part).split()[:4] == list(map(str, steps)), shown
    shown = run_here("diff", run / "checkpoint-6", run / "partial" / "step-00000006").stdout
    row = next(row for row in shown.splitlines() if row.startswith(f"{part}  "))
    assert row.removeprefix(part).split()[:4] == ["6", "6", "-", "-"], shown


def test_a_report_tells_ages_of_masters_and_moments_apart(tmp_path):
    """And lists a checkpoint once, however the run's folder is named."""
    run = tmp_path / "run"
    loop = Loop(run, policy="moments_in_turn:3").start()
    train(loop, 3)
    loop.saver.close()
    masters, moments = newest(run, 6)
    for is_composed in (False, True):
        if is_composed:
            assert run_here("merge", "--run", run).returncode == 0
        assert run_here("report", "run", "--force", cwd=tmp_path).returncode == 0
        page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
        names = page.table("checkpoint", "verdict").column("checkpoint")
        assert names and sorted(names) == sorted(set(names))
        assert "steps since the moments of a part were saved" in page.text
        ages = page.table("part", "saves")
        shown = {row[0]: (row[ages.head.index("masters at step")], row[2]) for row in ages.rows}
        assert shown == {part: (str(masters[part]), str(moments[part])) for part in masters}
        oldest = [part for part in moments if moments[part] == min(moments.values())]
        assert f"{6 - moments[oldest[0]]} steps older: {oldest[0]} moments" in page.text
    told = dict(zip(*map(page.table("part", "source").column, ("part", "step")), strict=True))
    assert told[oldest[0]] == f"{moments[oldest[0]]} (masters 6)"
