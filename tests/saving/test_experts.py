"""Experts as parts: what a run saves, composes, keeps and salvages, held against copies of the live tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors.torch import load_file  # noqa: E402

import llmtailor  # noqa: E402
from helpers.commands import run_here  # noqa: E402
from llmtailor.errors import SourceError, UsageError  # noqa: E402
from llmtailor.formats.registry import index_checkpoint  # noqa: E402
from llmtailor.recipe import Recipe  # noqa: E402
from llmtailor.recipe.strategies import StrategyOptions  # noqa: E402
from llmtailor.runs.scan import choose_for_run  # noqa: E402
from llmtailor.saving import saver_for  # noqa: E402
from llmtailor.saving.options import SavingOptions  # noqa: E402
from saving.loop import Loop  # noqa: E402

NUM_LAYERS, NUM_EXPERTS = 3, 4
BY_TURNS = "round_robin:5"
SHARES = ("non-expert", *(f"expert {number}" for number in range(NUM_EXPERTS)))
SHARES_OF_ALL = [f"layer {number} {share}" for number in range(NUM_LAYERS) for share in SHARES]
ALL = ["embed_tokens", *SHARES_OF_ALL, "norm", "lm_head"]


def small(run: Path, policy: str = BY_TURNS, **options: object) -> Loop:
    return Loop(run, hidden=16, layers=NUM_LAYERS, num_experts=NUM_EXPERTS, policy=policy, **options)


def saving(loop: Loop, policy: str, **options: object) -> None:
    """Let another saver go on with the same training."""
    loop.saver.close()
    scheduler = torch.optim.lr_scheduler.LambdaLR(loop.optimizer, lambda step: 1.0)
    model, optimizer = loop.model, loop.optimizer
    loop.saver = saver_for(loop.run, model=model, optimizer=optimizer, scheduler=scheduler, policy=policy, **options)
    loop.saver.start(loop.step)


def train(loop: Loop, saves: int) -> None:
    for _ in range(saves):
        loop.train(2)
        loop.save()
    loop.saver.finish()


def manifest(run: Path, step: int) -> dict[str, object]:
    return json.loads((run / "partial" / f"step-{step:08}" / "manifest.json").read_text())


def parts_of(run: Path, step: int) -> list[str]:
    return [part["part"] for part in manifest(run, step)["parts"]]


def newest(run: Path, at: int, part: str) -> int:
    """Return the step of the newest save that lists a part, or the whole layer that it is a share of."""
    names = {part, " ".join(part.split()[:2])}
    steps = [int(path.name[5:13]) for path in run.glob("partial/step-????????")]
    return max(step for step in steps if step <= at and names & {*parts_of(run, step)})


def check(loop: Loop, at: int, out: Path, held: Callable[[str], int] | None = None) -> None:
    """Demand of each expert, and of each other param, what it was at its newest save."""
    held = held or (lambda part: newest(loop.run, at, part))
    weights, optimizer = load_file(out / "model.safetensors"), torch.load(out / "optimizer.pt")
    names = [name for group in optimizer["param_groups"] for name in group["lt_params"]]
    assert sorted(names) == sorted(loop.truth[at])
    for number, name in enumerate(names):
        found = {"master": weights[name], **optimizer["state"][number]}
        layer = f"layer {name.split('.layers.')[1].split('.')[0]}" if ".layers." in name else ""
        for kind in ("master", "exp_avg", "exp_avg_sq"):
            if ".experts." in name:
                for expert in range(NUM_EXPERTS):
                    truth = loop.truth[held(f"{layer} expert {expert}")][name][kind][expert]
                    assert torch.equal(found[kind][expert], truth), (at, name, kind, expert)
            else:
                other = {"model.embed_tokens.weight": "embed_tokens", "model.norm.weight": "norm"}.get(name, "lm_head")
                truth = loop.truth[held(f"{layer} non-expert" if layer else other)][name][kind]
                assert torch.equal(found[kind], truth), (at, name, kind)


def compose(loop: Loop, at: int, out: Path, **options: object) -> Path:
    llmtailor.merge(choose_for_run(loop.run, at, StrategyOptions("latest"))[0], out, llmtailor.Options(**options))
    return out


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A base at step 2, and a fifth of the parts at each of steps 4 to 12. Never write into its folder."""
    loop = small(tmp_path_factory.mktemp("experts") / "run", experts="parts").start()
    train(loop, 6)
    loop.saver.close()
    return loop


@pytest.fixture
def copied(trained, tmp_path):
    from shutil import copytree

    copytree(trained.run, tmp_path / "run")
    trained.run, original = tmp_path / "run", trained.run
    yield trained
    trained.run = original


def test_saves_hold_single_experts_and_the_rest_of_a_layer(trained):
    assert parts_of(trained.run, 2) == ALL
    later = [parts_of(trained.run, step) for step in (4, 6, 8, 10, 12)]
    assert sorted(part for parts in later for part in parts) == sorted(ALL)
    assert any({"layer 0 expert 1"} <= {*parts} and "layer 0 expert 3" not in parts for parts in later)
    sizes = [
        sum(path.stat().st_size for path in (trained.run / "partial" / f"step-{step:08}").glob("rank-*"))
        for step in (2, 4, 6, 8, 10, 12)
    ]
    assert max(sizes[1:]) < sizes[0] / 2


@pytest.mark.parametrize("at", [2, 4, 8, 12])
def test_a_composite_has_the_newest_of_every_expert(trained, at, tmp_path):
    check(trained, at, compose(trained, at, tmp_path / "out"))


def test_the_recipe_of_a_run_says_the_same(trained, tmp_path):
    direct = compose(trained, 12, tmp_path / "direct")
    done = run_here("recipe", trained.run, "-o", tmp_path / "recipe.yaml")
    assert done.returncode == 0, done.stderr
    llmtailor.merge(tmp_path / "recipe.yaml", tmp_path / "out")
    for name in ("model.safetensors", "optimizer.pt"):
        assert (tmp_path / "out" / name).read_bytes() == (direct / name).read_bytes()
    explained = run_here("recipe", "--explain", tmp_path / "recipe.yaml")
    assert "expert" in explained.stdout and explained.returncode == 0
    (tmp_path / "again.yaml").write_text(explained.stdout)
    llmtailor.merge(tmp_path / "again.yaml", tmp_path / "again")
    assert (tmp_path / "again/optimizer.pt").read_bytes() == (direct / "optimizer.pt").read_bytes()


def test_a_recipe_selects_experts_of_complete_checkpoints(trained, tmp_path):
    old, new = (compose(trained, at, tmp_path / str(at)) for at in (2, 12))
    (tmp_path / "recipe.yaml").write_text(
        f"base_model: {new}\nparts: [{{from: {old}, select: [layers 0-1 expert 2, '*.2.mlp.experts.3.*']}}]\n"
    )
    llmtailor.merge(tmp_path / "recipe.yaml", tmp_path / "out")
    old_ones = {"layer 0 expert 2", "layer 1 expert 2", "layer 2 expert 3"}
    check(trained, 12, tmp_path / "out", lambda part: 2 if part in old_ones else newest(trained.run, 12, part))
    rows = json.loads((tmp_path / "out/llmtailor.json").read_text())["parts"]
    assert {row["part"] for row in rows if row["step"] == 2} >= old_ones
    assert all(row["is_whole"] for row in rows)
    total = sum((tmp_path / "out" / name).stat().st_size for name in ("model.safetensors", "optimizer.pt"))
    assert 0.9 * total < sum(row["num_bytes"] for row in rows) < total
    assert run_here("verify", "--deep", tmp_path / "out").returncode == 0


@pytest.mark.parametrize("options", [{}, {"to": "dcp"}], ids=["again", "converted"])
def test_a_composite_of_a_composite_keeps_the_step_of_every_expert(trained, options, tmp_path):
    first = compose(trained, 12, tmp_path / "first")
    llmtailor.merge(Recipe("again", "", first, (), None, None), tmp_path / "out", llmtailor.Options(**options))
    steps = steps_of(tmp_path / "out")
    assert steps == steps_of(first)
    assert {steps[f"layer 0 {share}"] for share in SHARES} == {4, 6}


def steps_of(composite: Path) -> dict[str, int]:
    rows = json.loads((composite / "llmtailor.json").read_text())["parts"]
    return {row["part"]: row["step"] for row in rows}


def test_with_rebase_each_expert_keeps_its_bias_corrected_moments(trained, tmp_path):
    out = compose(trained, 12, tmp_path / "out", step="rebase")
    optimizer = torch.load(out / "optimizer.pt")
    names = [name for group in optimizer["param_groups"] for name in group["lt_params"]]
    seen = set()
    for number, name in enumerate(names):
        if ".experts." in name:
            layer, state = name.split(".layers.")[1].split(".")[0], optimizer["state"][number]
            for expert in range(NUM_EXPERTS):
                at = newest(trained.run, 12, f"layer {layer} expert {expert}")
                truth, step = trained.truth[at][name]["exp_avg"][expert], float(state["step"])
                corrected = state["exp_avg"][expert] / (1 - 0.9**step)
                assert torch.allclose(corrected, truth / (1 - 0.9**at), rtol=1e-5, atol=1e-12)
                seen.add(step - at)
    assert len(seen) > 1


def test_commands_tell_experts_apart_only_where_they_differ(trained, tmp_path):
    step = trained.run / "partial" / "step-00000006"
    held = [part for part in parts_of(trained.run, 6) if part.startswith("layer")]
    inspected = json.loads(run_here("inspect", step, "--json").stdout)
    assert {row["part"] for row in inspected["parts"] if row["held"]} == {*held}
    assert "layer 2" in {row["part"] for row in inspected["parts"]}  # of which the save holds nothing
    manifested = {part["part"]: part["num_bytes"] for part in manifest(trained.run, 6)["parts"]}
    assert {row["part"]: row["num_bytes"] for row in inspected["parts"] if row["held"]} == manifested
    deep = run_here("verify", "--deep", step)
    assert deep.returncode == 0 and "intact" in deep.stdout
    done = run_here("diff", step, trained.run / "partial" / "step-00000002", "--by", "part")
    assert (done.returncode, done.stderr) == (10, "")  # they differ
    assert run_here("report", trained.run, "-o", tmp_path / "page.html", "--values").returncode == 0
    assert held[0] in (tmp_path / "page.html").read_text()


def test_a_layer_whose_shares_are_all_of_one_save_has_a_setback(trained):
    """Right after the base, nothing of some layers has been saved again."""
    told = json.loads(run_here("merge", "--run", trained.run, "--at", 4, "--dry-run", "--json").stdout)["parts"]
    estimated = manifest(trained.run, 4)["setback"]
    setback = {row["part"]: row["setback"] for row in told}
    shares = [steps for part, steps in estimated.items() if part.startswith("layer 2 ")]
    assert len(shares) == len(SHARES) and setback["layer 2"] == pytest.approx(sum(shares))
    assert sum(setback.values()) == pytest.approx(sum(estimated.values()))


def test_gc_keeps_what_the_newest_steps_need(copied, tmp_path):
    saving(copied, BY_TURNS, experts="parts")
    train(copied, 5)
    copied.saver.close()
    done = run_here("gc", copied.run, "--keep", 2, "--yes")
    assert done.returncode == 0, done.stderr
    left = sorted(int(path.name[5:]) for path in copied.run.glob("partial/step-*"))
    assert left == [12, 14, 16, 18, 20, 22]
    for at in (20, 22):
        check(copied, at, compose(copied, at, tmp_path / str(at)))
    copied.step = 12


def test_thin_makes_partial_checkpoints_of_composites_of_experts(copied, tmp_path):
    for at in (8, 12):
        compose(copied, at, copied.run / f"checkpoint-{at}")
    (copied.run / "partial/step-00000008").rename(tmp_path / "away")
    done = run_here("thin", copied.run, "--keep-full-last", 1, "--strategy", "full", "--yes")
    assert done.returncode == 0, done.stderr
    assert not (copied.run / "checkpoint-8").exists()
    (made,) = json.loads(run_here("merge", "--run", copied.run, "--at", 8, "--dry-run", "--json").stdout)["sources"]
    assert made["name"].endswith("step-00000008")
    out = compose(copied, 8, tmp_path / "out")
    (tmp_path / "away").rename(tmp_path / "run/partial/step-00000008.away")
    older = {step: {*parts_of(copied.run, step)} for step in (2, 4, 6)}
    eighth = json.loads((tmp_path / "run/partial/step-00000008.away/manifest.json").read_text())["parts"]
    older[8] = {part["part"] for part in eighth}
    check(copied, 8, out, lambda part: max(step for step, parts in older.items() if part in parts))


def test_salvage_takes_each_expert_from_its_newest_intact_save(copied):
    (copied.run / "partial/step-00000010" / "rank-00000-of-00001.safetensors").write_bytes(b"damaged")
    done = run_here("salvage", copied.run)
    assert done.returncode == 0, done.stderr

    def held(part: str) -> int:
        steps = [step for step in (2, 4, 6, 8, 12) if part in parts_of(copied.run, step)]
        return max(steps)

    check(copied, 12, copied.run / "salvaged-checkpoint-12", held)


def test_whole_layers_and_experts_in_one_run(tmp_path):
    """The record of saves is taken up both ways: experts after layers at once, layers after experts when held whole."""
    loop = small(tmp_path / "run", "parity").start()
    train(loop, 2)
    assert "layer 0" in parts_of(loop.run, 2)
    saving(loop, BY_TURNS, experts="parts")
    train(loop, 3)
    assert all(0 < len(parts_of(loop.run, step)) < 8 for step in (6, 8, 10))
    assert any(" expert " in part for part in parts_of(loop.run, 6))
    saving(loop, "parity")
    train(loop, 3)
    assert {f"layer {number}" for number in range(3)} <= {*parts_of(loop.run, 12)}
    assert len(parts_of(loop.run, 14)) < len(parts_of(loop.run, 12))
    loop.saver.close()
    for at in (4, 6, 8, 10, 12, 14, 16):
        check(loop, at, compose(loop, at, tmp_path / str(at)))


@pytest.mark.long
def test_what_the_newest_step_needs_is_never_deleted(tmp_path):
    loop = small(tmp_path / "run", "parity", keep_composable=1).start()
    train(loop, 3)
    for policy, options in ((BY_TURNS, {"experts": "parts"}), ("parity", {}), (BY_TURNS, {"experts": "parts"})):
        saving(loop, policy, keep_composable=1, **options)
        for _ in range(4):
            held = {part: newest(loop.run, loop.step, part) for part in ALL}
            train(loop, 1)
            held |= {part: loop.step for part in ALL if {part, part[:7]} & {*parts_of(loop.run, loop.step)}}
            check(loop, loop.step, compose(loop, loop.step, tmp_path / str(loop.step)), held.__getitem__)
    loop.saver.close()


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = torch.nn.Linear(6, 6)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(NUM_EXPERTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + sum(expert(torch.tanh(self.attn(x))) for expert in self.experts)


def test_experts_with_tensors_of_their_own(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList(Block() for _ in range(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    options = {"policy": "round_robin:3", "experts": "parts"}
    saver = saver_for(tmp_path / "run", model=model, optimizer=optimizer, scheduler=scheduler, **options)
    saver.start(0)
    truth = {}
    for step in range(1, 5):
        x = torch.randn(3, 6)
        for layer in model.layers:
            x = layer(x)
        x.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        truth[step] = {name: param.detach().clone() for name, param in model.named_parameters()}
        saver.save(step)
    saver.close()
    shares = [f"layer 0 {share}" for share in SHARES[:4]]
    assert parts_of(tmp_path / "run", 2) == shares
    done = run_here("merge", "--run", tmp_path / "run", "--at", 3, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    weights = load_file(tmp_path / "out/model.safetensors")
    for name, weight in weights.items():
        _, layer, module, number = name.split(".")[:4]
        part = f"layer {layer} expert {number}" if module == "experts" else f"layer {layer} non-expert"
        assert torch.equal(weight, truth[newest(tmp_path / "run", 3, part)][name]), name


def change(path: Path, edit: Callable[[dict], None]) -> None:
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def piece(content: dict, part: str) -> dict:
    return next(one for one in content["parts"] if one["part"] == part)["pieces"]


NAME = "model.layers.0.mlp.experts.down_proj"


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        ([0, 512], "same elements"),
        ([512, 4096], "do not exist"),
        ([700, 700], "do not exist"),
        ([-1, 512], "not a count"),
        ([512, 1000], "do not make up the param"),
        ([512], "not enough values"),
    ],
)
def test_a_manifest_that_lies_about_experts_is_refused(copied, run, reason):
    step = copied.run / "partial" / "step-00000004"
    assert piece(manifest(copied.run, 4), "layer 0 expert 1")[NAME] == [512, 1024]
    change(step / "manifest.json", lambda content: piece(content, "layer 0 expert 1").update({NAME: run}))
    with pytest.raises(SourceError, match=reason):
        index_checkpoint(step)


LIES = {"[[0,511]]": "other elements", "[[512,0]]": "neither a count", "[]": "other elements"}


@pytest.mark.parametrize(("runs", "reason"), LIES.items())
def test_a_rank_shard_that_lies_about_experts_is_refused(copied, runs, reason):
    step = copied.run / "partial" / "step-00000004"
    path = step / "rank-00000-of-00001.safetensors"
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    begin = json.loads(header["__metadata__"]["begin"])
    begin[NAME] = json.loads(runs)
    header["__metadata__"]["begin"] = json.dumps(begin)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    made = len(text).to_bytes(8, "little") + text + content[8 + size :]
    path.write_bytes(made)
    change(step / "manifest.json", lambda content: content["bundles"][0].update(num_bytes=len(made)))
    with pytest.raises(SourceError, match=reason):
        index_checkpoint(step)


def test_the_option_is_checked():
    with pytest.raises(UsageError, match="experts"):
        SavingOptions(experts="each")
