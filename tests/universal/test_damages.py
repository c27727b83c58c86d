"""What a resume from a universal checkpoint trips over, or swallows; `verify` says so. And hostile files.

What stock does was read in DeepSpeed 0.19.8.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import llmtailor  # noqa: E402
from llmtailor.checkpoint.layout import Plan  # noqa: E402
from llmtailor.codes import Code  # noqa: E402
from llmtailor.containers.torch_file import lay_out_torch_file, read_torch_file  # noqa: E402
from llmtailor.containers.unpickle import Call, Global  # noqa: E402
from llmtailor.engine.copy import execute  # noqa: E402
from llmtailor.errors import SourceError, UnsafePickle, UnsupportedCheckpoint  # noqa: E402
from llmtailor.recipe import Recipe  # noqa: E402
from llmtailor.verify.verify import verify_checkpoint  # noqa: E402
from synthetic import SHAPES, lay_out, make_checkpoint  # noqa: E402
from universal.converting import convert  # noqa: E402

TAG = "global_step100_universal"
NAME = "model.layers.0.mlp.up_proj.weight"
PARAM = f"{TAG}/zero/{NAME}"
GLOBAL = f"{TAG}/zero/optimizer_state.pt"
MODEL = f"{TAG}/zero_pp_rank_0_mp_rank_00_model_states.pt"
Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    shape = replace(SHAPES["tiny"], vocab_size=5, hidden_size=4, intermediate_size=6, num_layers=2, head_dim=2)
    shape = replace(shape, num_heads=2, num_kv_heads=1)
    make_checkpoint(folder / "checkpoint-100", shape, lay_out(shape, 2), 100)
    return convert(folder / "checkpoint-100", folder / "universal" / "checkpoint-100", to="universal")


@pytest.fixture
def damaged(sound, tmp_path):
    (tmp_path / "run").mkdir()
    root = tmp_path / "run" / "checkpoint-100"
    shutil.copytree(sound, root)
    (root / "llmtailor.json").unlink()  # its checksums would tell of every damage
    return root


def edit(path: str, change: Callable[[Any], Any]) -> Damage:
    """Change the object in a torch file."""

    def apply(root: Path) -> None:
        file = read_torch_file(root, path, path)
        tree = change(file.tree)
        layout = lay_out_torch_file(path, file.tree if tree is None else tree)
        plan = Plan((str(root),), (layout,))
        scratch = root.parent / "scratch"
        scratch.mkdir()
        execute(plan, scratch)
        shutil.move(scratch / path, root / path)
        shutil.rmtree(scratch)

    return apply


def drop(key: str) -> Callable[[Any], None]:
    return lambda tree: tree.pop(key) and None


def save(path: str, make: Callable[[], Any]) -> Damage:
    return lambda root: torch.save(make(), root / path)


def flip(root: Path) -> None:
    data = bytearray((root / f"{PARAM}/fp32.pt").read_bytes())
    data[read_torch_file(root, f"{PARAM}/fp32.pt", "x").records["0"].start + 5] ^= 1
    (root / f"{PARAM}/fp32.pt").write_bytes(data)


def swap(root: Path) -> None:
    one, other, between = (root / f"{PARAM}/{name}.pt" for name in ("fp32", "exp_avg", "x"))
    one.rename(between)
    other.rename(one)
    between.rename(other)


def steps(**of: float) -> Damage:
    return lambda root: [torch.save(torch.tensor(step), root / f"{PARAM}/{name}.pt") for name, step in of.items()]


CASES: list[tuple[str, Damage, str, Code, str, str]] = [
    ("no `latest_universal`", lambda root: (root / "latest_universal").unlink(), "error", Code.FILE_NAME,
     "the file is missing", "fails"),
    ("`latest_universal` names another tag", lambda root: (root / "latest_universal").write_text("global_step7"),
     "error", Code.FILE_NAME, "points to 'global_step7'", "fails"),
    ("no optimizer_state.pt", lambda root: (root / GLOBAL).unlink(), "error", Code.FILE_MISSING, "missing", "fails"),
    ("optimizer_state.pt cut short", lambda root: os.truncate(root / GLOBAL, 500), "error", Code.FILE_DAMAGED,
     "truncated", "fails"),
    ("no model states", lambda root: (root / MODEL).unlink(), "error", Code.FILE_MISSING, "missing", "fails"),
    ("a master is missing", lambda root: (root / f"{PARAM}/fp32.pt").unlink(), "error", Code.FILE_MISSING,
     "the file is missing", "fails in ZeRO-3; **silent** in ZeRO-1/2: the weights of the new model stay"),
    ("a moment is missing", lambda root: (root / f"{PARAM}/exp_avg.pt").unlink(), "error", Code.FILE_MISSING,
     "the file is missing", "fails"),
    ("a file of a param cut short", lambda root: os.truncate(root / f"{PARAM}/exp_avg.pt", 500), "error",
     Code.FILE_DAMAGED, "truncated", "fails"),
    ("a param's folder is missing", lambda root: shutil.rmtree(root / PARAM), "error", Code.FILE_MISSING,
     "the file is missing", "fails"),
    ("a tensor of another shape", save(f"{PARAM}/fp32.pt", lambda: {"param": torch.zeros(3, 3)}), "error",
     Code.STATE_SIZE, "has shape [3, 3]", "fails"),
    ("master and moment swapped", swap, "error", Code.FILE_SWAPPED, "was saved as", "**silent**"),
    ("a step is missing", lambda root: (root / f"{PARAM}/step.pt").unlink(), "error", Code.STEPS_DIFFER, "none",
     "fails in ZeRO-1/2; not read in ZeRO-3"),
    ("another step of a param", steps(step=7.0), "error", Code.STEPS_DIFFER, "have the steps 7, 100",
     "fails in ZeRO-1/2; not read in ZeRO-3"),
    ("another step in optimizer_state.pt",
     edit(GLOBAL, lambda tree: tree["optimizer_state_dict"]["state"].update({0: {"step": 7}})), "error",
     Code.STEPS_DIFFER, "is 7, but", "**silent** in ZeRO-3: all params get it"),
    ("no loss scaler", edit(GLOBAL, drop("loss_scaler")), "", Code.OTHER, "", "resumes: the run's own stays"),
    ("no param groups", edit(GLOBAL, drop("param_groups")), "error", Code.FIELD_MISSING, "param_groups is missing",
     "fails in ZeRO-1/2; not read in ZeRO-3"),
    ("a flipped bit", flip, "error", Code.CHECKSUM, "checksum", "**silent**"),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "severity", "code", "told"), [c[1:5] for c in CASES], ids=[c[0] for c in CASES])
def test_a_damage_is_told(damaged, tmp_path, damage, severity, code, told):
    damage(damaged)
    verdict = verify_checkpoint(damaged, deep=True, name="x")
    if not severity:
        assert verdict.is_resumable, verdict.findings
        return
    found = [one for one in verdict.findings if one.code is code and told in one.what]
    assert found, "\n".join(map(str, verdict.findings))
    assert found[0].severity == severity and found[0].fix
    assert not verdict.is_resumable
    if code is not Code.CHECKSUM:
        with pytest.raises(SourceError):
            llmtailor.merge(Recipe("x", "", damaged, (), None, None), tmp_path / "out")


def test_the_page_lists_these_damages():
    page = (Path(__file__).parents[2] / "docs" / "findings.md").read_text()
    for title, _, severity, _, _, stock in CASES:
        assert f"| universal: {title} | {severity or '-'} | {stock} |" in page, title


def named(name: str) -> Damage:
    """Give a param another name in the model states."""

    def change(tree: Any) -> None:
        (shapes,) = [shapes for shapes in tree["param_shapes"] if NAME in shapes]
        shapes[name] = shapes.pop(NAME)
        tree["module"][name] = tree["module"].pop(NAME)

    def apply(root: Path) -> None:
        for path in (MODEL, MODEL.replace("rank_0_", "rank_1_")):
            edit(path, change)(root)

    return apply


def code(root: Path) -> None:
    edit(f"{PARAM}/step.pt", lambda tree: Call(Global("os", "system"), ("touch ran",)))(root)


HOSTILE: list[tuple[str, Damage, type[SourceError], str]] = [
    ("code in a step", code, UnsafePickle, "os.system"),
    ("code beside a tensor",
     edit(f"{PARAM}/fp32.pt", lambda tree: {**tree, "x": Call(Global("os", "system"), ("touch ran",))}), UnsafePickle,
     "os.system"),
    ("a param named as a path outside", named("../../../x"), SourceError, "missing|module"),
    ("an absolute name", named("/etc/passwd"), SourceError, "missing|module"),
    ("tensor parallelism", edit(f"{PARAM}/fp32.pt", lambda tree: {**tree, "vocab_tensor": True}), UnsupportedCheckpoint,
     "vocab_tensor"),
    ("a tag outside", lambda root: (root / "latest_universal").write_text("../x"), SourceError, "points to"),
    ("a pipe", lambda root: ((root / f"{PARAM}/fp32.pt").unlink(), os.mkfifo(root / f"{PARAM}/fp32.pt")), SourceError,
     "missing|pipe"),
    ("a state with a name of ours", lambda root: shutil.copy(root / f"{PARAM}/fp32.pt", root / f"{PARAM}/weight.pt"),
     SourceError, "weight"),
    ("no number as step", save(f"{PARAM}/step.pt", lambda: torch.tensor(float("nan"))), SourceError, "not a number"),
    ("sub-groups of nobody", edit(GLOBAL, lambda tree: tree["param_groups"][0].update(params=[5])), SourceError,
     "own the sub-groups"),
    ("too many sub-groups", edit(GLOBAL, lambda tree: tree["param_groups"].append({"params": [2]})), SourceError,
     "own 3 sub-groups"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "error", "told"), [c[1:] for c in HOSTILE], ids=[c[0] for c in HOSTILE])
def test_a_hostile_file_is_refused(damaged, tmp_path, monkeypatch, make, error, told):
    monkeypatch.chdir(tmp_path)
    make(damaged)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(error, match=told) as caught:
        llmtailor.merge(Recipe("x", "", damaged, (), None, None), tmp_path / "out", llmtailor.Options(to="deepspeed"))
    assert all(problem.fix for problem in caught.value.problems)
    assert sorted(tmp_path.rglob("*")) == before
