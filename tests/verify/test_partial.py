"""``verify`` of partial checkpoints: what it says of intact ones, and each damage at the level that shall find it."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.cases import diagonal
from helpers.commands import call
from helpers.files import edit_json, flip
from llmtailor.errors import SourceError
from llmtailor.formats.registry import display_name, index_checkpoint
from llmtailor.model.roles import EXP_AVG_SQ, MASTER
from llmtailor.salvage.plan import assess
from llmtailor.verify.verify import DAMAGED, INTACT, INTACT_WITH_WARNINGS, Verdict, verify_checkpoint
from partial.scene import FORMS, bundles, edit_manifest, make_run, mend_manifest, partials


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("pristine")
    return {form: make_run(form, root / form) for form in FORMS}


@pytest.fixture
def copy_of(pristine: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    return lambda form: Path(shutil.copytree(pristine[form], tmp_path / "run"))


@pytest.mark.parametrize("form", FORMS)
def test_intact_ones_are_told_by_what_they_hold(pristine, form):
    first, second, _ = partials(pristine[form])
    for deep in ([], ["--deep"]):
        told = call("verify", first, *deep).stdout
        assert f"{display_name(first)}: {INTACT}\n" in told and "\nholds all " in told
        told = call("verify", second, *deep).stdout
        assert told.count("\n") == 3
        step = json.loads((second / "manifest.json").read_text())["step"]
        assert f"llmtailor merge --run {display_name(pristine[form])} --at {step}\n" in told


def test_json_says_which_parts(pristine):
    run = pristine["zero3"]
    told = json.loads(call("verify", partials(run)[1], "--json").stdout)
    assert (told["verdict"], told["resumable"], told["intact"]) == (INTACT, False, True)
    assert told["parts"] == {
        "held": ["layer 0", "layer 2", "norm"],
        "absent": ["embed_tokens", "layer 1", "layer 3", "lm_head"],
    }


@pytest.mark.parametrize("form", FORMS)
def test_deep_reads_each_byte_of_the_bundles_once(copy_of, form):
    for checkpoint in partials(copy_of(form)):
        (checkpoint / "training_args.bin").unlink(missing_ok=True)  # that of a zip file's records, too
        read: list[int] = []
        assert verify_checkpoint(checkpoint, deep=True, on_progress=read.append).level == INTACT
        assert sum(read) == sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))


OTHER = "the file is not the one that the save wrote"


def cut(size: int) -> Callable[..., object]:
    return lambda path, *_: path.write_bytes(path.read_bytes()[:size])


def end(data: bytes) -> Callable[..., object]:
    return lambda path, *_: path.write_bytes(path.read_bytes()[: -len(data)] + data)


def flip_data(path: Path, *_: Path) -> None:
    held = index_checkpoint(path.parent).held
    state = next(state for state, one in held.items() if one.is_here and state.kind == MASTER)
    (fragment,) = held[state].place.cover(0, 1)
    assert fragment.extent.path == path.name
    flip(path, fragment.extent.start)


def swap(path: Path, other_rank: Path, _: Path) -> None:
    raw = path.read_bytes()
    path.write_bytes(other_rank.read_bytes())
    other_rank.write_bytes(raw)


def huge_header(path: Path, *_: Path) -> None:
    path.write_bytes(struct.pack("<Q", 1 << 60) + path.read_bytes()[8:])


RANK, FROZEN_FILE = "rank-*.safetensors", "frozen-*.safetensors"
SAVER, ZERO3, RANKS = ("saver",), ("zero3",), ("zero3", "zero2", "plain")
DAMAGES: dict[str, tuple[str, Callable[..., object], tuple[str, ...], str]] = {
    "a flipped bit in the data (--deep)": (RANK, flip_data, FORMS, OTHER),
    "a flipped bit in frozen params (--deep)": (FROZEN_FILE, lambda path, *_: flip(path, -1), SAVER, OTHER),
    "nothing left": (RANK, cut(0), FORMS, ""),
    "a length left": (RANK, cut(5), FORMS, ""),
    "a part of the header left": (RANK, cut(700), FORMS, ""),
    "the last byte missing": (RANK, cut(-1), FORMS, ""),
    "a header that is too long": (RANK, huge_header, ZERO3, "header is damaged"),
    "a bundle missing": (RANK, lambda path, *_: path.unlink(), ZERO3, "the file is missing"),
    "frozen params missing": (FROZEN_FILE, lambda path, *_: path.unlink(), SAVER, "the file is missing"),
    "bundles of two ranks swapped": (RANK, swap, RANKS, ""),
    "bundles of two ranks swapped (mended)": (RANK, swap, RANKS, "it states rank '1', but manifest.json states"),
    "a bundle of another save": (RANK, lambda path, _, save: shutil.copy(save, path), FORMS, ""),
    "a bundle of another save (mended)": (
        RANK,
        lambda path, _, save: shutil.copy(save, path),
        FORMS,
        "it is of another save than manifest.json",
    ),
    "frozen params of another run (--deep)": (FROZEN_FILE, end(bytes(400)), SAVER, OTHER),
    "infinity in frozen params (--deep, mended)": (
        FROZEN_FILE,
        end(struct.pack("<f", float("inf"))),
        SAVER,
        "the frozen value of model.embed_tokens.weight is not finite",
    ),
}
"""Which file, what is done to it (given also that of another rank, and of another save), the forms, what is said"""


@pytest.mark.parametrize(
    ("form", "title"),
    [
        pytest.param(form, title, marks=() if number == at % len(row[2]) else pytest.mark.long)
        for at, (title, row) in enumerate(DAMAGES.items())
        for number, form in enumerate(row[2])
    ],
)
def test_a_damage_is_told(copy_of, form, title):
    pattern, damage, _, told = DAMAGES[title]
    second, third = (sorted(save.glob(pattern)) for save in partials(copy_of(form))[1:])
    damage(second[0], second[-1], third[0])
    for path in second if "mended" in title else ():
        mend_manifest(path)
    check(second[0], told, deep="--deep" in title)


def check(path: Path, told: str, deep: bool) -> None:
    """With ``deep`` the damage is found by reading only."""
    checkpoint = path.parent
    if deep:
        assert verify_checkpoint(checkpoint).level == INTACT
    verdict = verify_checkpoint(checkpoint, deep=deep)
    assert verdict.level == DAMAGED and not verdict.is_intact
    found = [finding for finding in verdict.findings if told in finding.what]
    assert found and all(finding.fix for finding in found), verdict.findings
    assert found[0].where.endswith(path.name)
    assert path.name in verdict.damage.files or verdict.damage.states
    call("verify", checkpoint, *(["--deep"] if deep else []), code=7)


@pytest.mark.parametrize(("form", "where"), diagonal(FORMS, [-1, -200, 9000]))
def test_a_flipped_bit_anywhere_else(copy_of, form, where):
    """9,000 is in the header: inside of a tree, where JSON may stay JSON."""
    path = bundles(partials(copy_of(form))[1])[-1]
    flip(path, where)
    assert verify_checkpoint(path.parent, deep=True).level == DAMAGED


def test_a_damage_of_each_bundle_is_told_at_once(copy_of):
    checkpoint = partials(copy_of("zero3"))[1]
    for path in bundles(checkpoint):
        flip(path, -1)
    verdict = verify_checkpoint(checkpoint, deep=True)
    assert {*verdict.damage.files} == {path.name for path in bundles(checkpoint)}
    with pytest.raises(SourceError, match=OTHER):  # a salvage takes nothing out of these
        assess(checkpoint, deep=True)


@pytest.mark.parametrize(
    ("form", "case"), diagonal(FORMS, [(MASTER, float("nan"), "not finite"), (EXP_AVG_SQ, -1.0, "negative")])
)
def test_values(copy_of, form, case):
    kind, value, told = case
    checkpoint = partials(copy_of(form))[1]
    state = next(
        state for state, held in index_checkpoint(checkpoint).held.items() if held.is_here and state.kind == kind
    )
    (fragment,) = index_checkpoint(checkpoint).held[state].place.cover(2, 3)
    path = checkpoint / fragment.extent.path
    raw = bytearray(path.read_bytes())
    raw[fragment.extent.start : fragment.extent.stop] = struct.pack("<f", value)
    path.write_bytes(raw)
    mend_manifest(path)
    check(path, told, deep=True)
    assert verify_checkpoint(checkpoint, deep=True).damage.states == {state: ((2, 3),)}
    assert assess(checkpoint, deep=True).lost == {state: ((2, 3),)}  # a salvage takes the rest


def found(verdict: Verdict) -> list[tuple[str, str]]:
    return [(finding.severity, finding.what) for finding in verdict.findings]


def test_the_record_of_saves_is_looked_at(copy_of):
    _, second, third = partials(copy_of("zero3"))
    ledger = json.loads((third / "manifest.json").read_text())["ledger"]
    edit_manifest(second, lambda manifest: manifest.update(ledger=ledger))
    assert found(verify_checkpoint(second)) == [("error", "its record of earlier saves does not end with this save")]
    edit_manifest(second, lambda manifest: manifest.update(ledger={}))
    assert ("error", "the record of earlier saves is damaged: it lacks lineage") in found(verify_checkpoint(second))


def test_a_save_that_did_not_finish(copy_of):
    second = partials(copy_of("zero3"))[1]
    (second / "manifest.json").unlink()
    verdict = verify_checkpoint(second)
    assert verdict.level == DAMAGED and verdict.index is None
    assert found(verdict) == [("error", "there is no manifest.json: the save did not finish")]
    call("verify", second, code=7)


def test_warnings_keep_it_intact(copy_of):
    second = partials(copy_of("zero3"))[1]
    moved = second.rename(second.with_name("step-00000250"))
    (moved / "generation_config.json").write_text("{")
    verdict = verify_checkpoint(moved)
    assert verdict.level == INTACT_WITH_WARNINGS
    call("verify", moved)
    assert {severity for severity, _ in found(verdict)} == {"warning"} and len(verdict.findings) == 2


def test_what_it_carries_of_the_composite_that_it_was_made_of_is_no_claim(pristine):
    """A full checkpoint that was a composite leaves its llmtailor.json, for the ages of the parts."""
    checkpoint = partials(pristine["zero2"])[1]
    assert (checkpoint / "llmtailor.json").is_file()
    assert verify_checkpoint(checkpoint, deep=True).findings == ()


@pytest.mark.parametrize("form", FORMS)
def test_fields_of_the_files_inside_and_beside_are_looked_at(copy_of, form):
    """The tables of `frameworks.stock_fields` hold for what the bundles carry, too."""
    checkpoint = partials(copy_of(form))[0]
    for path in bundles(checkpoint):
        path.write_bytes(path.read_bytes().replace(b"last_epoch", b"last_epocX"))  # as long as before
    edit_json(checkpoint / "trainer_state.json", lambda state: {**state, "log_history": 1})
    verdict = verify_checkpoint(checkpoint)
    assert verdict.level == DAMAGED
    assert "last_epoch is missing" in {finding.what for finding in verdict.findings}
    assert "trainer_state.json" in {finding.path for finding in verdict.findings}
