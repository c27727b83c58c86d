"""What stock training leaves behind is resumable, and so is what llmtailor writes; merge publishes nothing else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from helpers.cases import every
from helpers.checkpoints import edit, make_run, optim_states
from helpers.composing import convert
from helpers.files import edit_json
from llmtailor.compose.plan import Options, plan_merge
from llmtailor.compose.write import merge, write
from llmtailor.errors import VerificationError
from llmtailor.model.roles import EXP_AVG, MASTER
from llmtailor.recipe import Recipe
from llmtailor.recipe.parse import parse_recipe
from llmtailor.verify.verify import NOT_RESUMABLE, RESUMABLE, WITH_WARNINGS, to_json, verify_checkpoint
from trainings.catalogue import DEEPSPEED

# --- of stock training ------------------------------------------------------------------------------------------------

SAYS = {
    "llama-no-gather": "there are no weights",
    "zero1-elastic": "can't be resumed by stock DeepSpeed",
    "zero2-elastic": "can't be resumed by stock DeepSpeed",
}


@pytest.mark.parametrize("name", DEEPSPEED)
def test_every_kind_of_run(runs, name):
    first, *_, last = sorted(runs[name].folder.glob("checkpoint-*"))
    for checkpoint in (first, last):
        read: list[int] = []
        deep = verify_checkpoint(checkpoint, deep=True, on_progress=read.append)
        assert deep.level == (NOT_RESUMABLE if "elastic" in name else RESUMABLE)
        assert [SAYS[name] in finding.what for finding in deep.findings] == ([True] if name in SAYS else [])
        assert not deep.damage.files and not deep.damage.states
        assert verify_checkpoint(checkpoint).findings == deep.findings
        assert json.loads(json.dumps(to_json(deep)))["damaged_states"] == []
        assert deep.index is not None
        optimizer = [held.num_bytes for state, held in deep.index.held.items() if state.kind in (MASTER, EXP_AVG)]
        assert sum(read) > sum(optimizer)


# --- of llmtailor -----------------------------------------------------------------------------------------------------


def compose(base: Path, other: Path, out: Path, extra: str = "", **options: object) -> Path:
    text = f"base_model: {base}\nparts:\n  - from: {other}\n    select: [odd]\n{extra}"
    merge(parse_recipe(text, name="recipe", folder=out.parent, environ={}), out, Options(**options))  # type: ignore[arg-type]
    return out


def assert_clean(checkpoint: Path) -> None:
    verdict = verify_checkpoint(checkpoint, deep=True)
    assert verdict.level == RESUMABLE, verdict.findings
    assert not verdict.findings and not verdict.damage.states and not verdict.damage.files


LAYOUTS = [(stage, ranks) for stage in (None, 0, 1, 2) for ranks in (1, 3)]
CONVERSIONS = [
    *(
        pytest.param(name, 4, *layout, marks=pytest.mark.long if at % 4 else ())
        for name in ("llama-layer", "zero2-rr", "qwen3-moe")
        for at, layout in enumerate(LAYOUTS, name == "zero2-rr")
    ),
    *(("llama-extras-layer", 4, *layout) for layout in ((None, 1), (None, 3), (2, 3))),  # buffers of other ranks
    *((name, 1, None, 3) for name in ("llama-fp16", "zero2-fp16")),  # without a good step yet
]


@pytest.mark.parametrize(("name", "step", "stage", "world_size"), CONVERSIONS)
def test_conversions_verify(runs, tmp_path, name, step, stage, world_size):
    assert_clean(convert(runs[name].checkpoint(step), tmp_path / "out", world_size=world_size, stage=stage))


@pytest.mark.parametrize("name", every(2, ["llama-layer", "llama", "zero1-extras-layer", "zero2"]))
def test_composites_verify(runs, tmp_path, name):
    assert_clean(compose(runs[name].checkpoint(6), runs[name].checkpoint(2), tmp_path / "out", world_size=3))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_weights_in_another_dtype_are_a_note(runs, tmp_path, dtype):
    out = compose(runs["llama"].checkpoint(6), runs["llama"].checkpoint(4), tmp_path / "out", f"dtype: {dtype}\n")
    verdict = verify_checkpoint(out, deep=True)
    assert verdict.level == RESUMABLE
    assert ["the run trained in BF16" in finding.what for finding in verdict.findings] == [True]


def test_weights_that_differ_from_the_masters_on_purpose_are_a_warning(run, tmp_path):
    a, b = run / "checkpoint-100", run / "checkpoint-200"
    text = (
        f"base_model: {b}\nslices: [{{sources: [{{model: {a}, layer_range: [0, 0]}}]}}]\n"
        f"pre_weights: [{{name: norm, model: {b}}}]\n"
    )
    recipe = parse_recipe(text, name="recipe", folder=tmp_path, environ={})
    merge(recipe, tmp_path / "out", Options(allow_split=True))
    verdict = verify_checkpoint(tmp_path / "out", deep=True)
    assert verdict.level == WITH_WARNINGS
    (finding,) = verdict.findings
    assert finding.what.startswith("weight of model.norm.weight is not the rounded master, as requested")
    assert not verdict.damage.states


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("run"), (100, 200))


@pytest.fixture
def composite(run, tmp_path):
    return compose(run / "checkpoint-200", run / "checkpoint-100", tmp_path / "checkpoint-200")


def test_a_state_changed_after_the_merge_shows_in_file_and_part(composite):
    """Even where no copy tells: in a moment, and with the zip's checksum made right again."""

    def change(tree):
        tree["optimizer_state_dict"]["optimizer_state_dict"]["state"][0]["exp_avg"][0] += 1

    edit(optim_states(composite), change)
    cheap = verify_checkpoint(composite)
    deep = verify_checkpoint(composite, deep=True)
    assert deep.level == NOT_RESUMABLE
    part = "the states of embed_tokens are not those that the merge wrote"
    assert part in [finding.what for finding in deep.findings]
    assert part not in [finding.what for finding in cheap.findings]


def test_a_changed_json_is_a_warning(composite):
    path = composite / "trainer_state.json"
    text = path.read_text()
    path.write_text(text.replace('"total_flos": 0.0', '"total_flos": 1.0'))
    assert path.read_text() != text
    verdict = verify_checkpoint(composite, deep=True, name="x")
    assert verdict.level == WITH_WARNINGS
    (finding,) = verdict.findings
    assert (finding.where, finding.fix) == ("x/trainer_state.json", "none needed if you changed it yourself")
    path.write_text(text + "\n")
    (finding,) = verify_checkpoint(composite, name="x").findings  # the size tells without reading
    assert f"it had {len(text):,} bytes when written" in finding.what


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda content: content.update(global_step=7), "global_step was 7"),
        (lambda content: content.update(world_size=5), "the world size was 5"),
        (lambda content: content["optimizer_steps"][0].update(step=3.0), "the optimizer's step of sub-group 0 was 3"),
        (lambda content: content["files"].append({"path": "more", "num_bytes": 1, "crc32": "0"}), "now missing"),
        (lambda content: {key: content[key] for key in content.keys() - {"files"}}, "the manifest is damaged"),
    ],
)
def test_a_manifest_that_does_not_fit(composite, change, told):
    edit_json(composite / "llmtailor.json", change)
    verdict = verify_checkpoint(composite)
    assert any(told in finding.what for finding in verdict.findings), verdict.findings
    assert verdict.level != RESUMABLE


def test_merge_does_not_publish_what_no_resume_takes(run, tmp_path, monkeypatch):
    from llmtailor.compose import write as publish

    recipe = Recipe(name="copy", base=run / "checkpoint-200")
    composition = plan_merge(recipe, tmp_path / "out", Options())
    execute = publish.execute

    def execute_and_spoil(plan, staging, *more):
        result = execute(plan, staging, *more)
        (staging / "trainer_state.json").write_text('{"global_step": 3}')
        return result

    monkeypatch.setattr(publish, "execute", execute_and_spoil)
    with pytest.raises(VerificationError, match="global_step is 3, but DeepSpeed's is 200"):
        write(composition)
    assert not (tmp_path / "out").exists()


def test_what_a_base_lacks_is_published_only_if_asked_for(run, tmp_path):
    """The notices say it before anything is written; the composite would be as resumable as its base."""
    base = tmp_path / "checkpoint-200"
    shutil.copytree(run / "checkpoint-200", base)
    (base / "scheduler.pt").unlink()
    recipe = Recipe(name="copy", base=base)
    composition = plan_merge(recipe, tmp_path / "out", Options())
    assert any("no scheduler state" in notice.what for notice in composition.report.notices)
    moved: list[int] = []
    with pytest.raises(VerificationError, match="no scheduler state") as raised:
        write(composition, on_progress=moved.append)
    assert "--allow-errors" in f"{raised.value.problems[-1]}" and not moved
    assert [path.name for path in tmp_path.iterdir()] == [base.name]
    write(plan_merge(recipe, tmp_path / "out", Options(allow_errors=True)))
    verdict = verify_checkpoint(tmp_path / "out")
    assert [finding.what for finding in verdict.of_severity("error")] == ["there is no scheduler state"]
