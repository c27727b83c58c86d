"""Partial checkpoints that were tampered with are refused, or skipped with a reason, or make the right composite.

Where a test mends the manifest's sizes and checksums, nothing but sense gives the damage away. Then a composite may
show a value that was put there (a learning rate), but never other elements of a state.

``LLMTAILOR_FUZZ_ROUNDS=1000`` tries that many changes of each kind.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import llmtailor
from campaigns.fuzz import mutate_content
from helpers.cases import diagonal
from helpers.files import flip
from helpers.states import read
from llmtailor.cli.main import cli
from llmtailor.errors import RecipeError, SourceError, TailorError, VerificationError
from llmtailor.formats.registry import index_checkpoint
from llmtailor.model.roles import State
from llmtailor.runs.scan import scan_run
from llmtailor.verify.inspect import inspect_checkpoint
from llmtailor.verify.verify import verify_checkpoint
from partial.scene import bundles, edit_header, edit_manifest, freeze, make_run, mend_manifest, partials
from thin.scene import compose
from trainings.alone import Alone

ROUNDS = [7, pytest.param(int(os.environ.get("LLMTAILOR_FUZZ_ROUNDS", "30")), marks=pytest.mark.long)]
FORMS = ("zero3", "saver")
HUGE = 10**40
States = dict[State, Any]
Header = dict[str, Any]


class Scene:
    """A run, and what merges of it must yield: with its newest partial checkpoint, or without."""

    def __init__(self, pristine: Path, run: Path, right: tuple[States, ...] | None) -> None:
        self.run, self.out = run, run.parent / "out"
        shutil.copytree(pristine, run)
        self.newest = partials(run)[-1]
        self.right = right or self.both()

    def both(self) -> tuple[States, States]:
        with_it = self.compose()
        aside = self.newest.rename(self.run.parent / "aside")
        without = self.compose()
        aside.rename(self.newest)
        return with_it, without

    def compose(self) -> States:
        """Do what ``llmtailor merge --run`` does, and read the states."""
        shutil.rmtree(self.out, ignore_errors=True)
        compose(self.run, 10**6, self.out)
        return {state: read(self.out, held) for state, held in index_checkpoint(self.out).held.items()}

    def check(self) -> bool:
        """Demand a refusal with a mend, which a run's commands skip it by, or a composite with the right states.

        Return whether the checkpoint was accepted.
        """
        verdict = verify_checkpoint(self.newest, deep=True)
        assert all(finding.fix for finding in verdict.findings if finding.severity == "error")
        try:
            index_checkpoint(self.newest)
            inspect_checkpoint(self.newest)
        except SourceError as error:
            assert all(problem.where and problem.what and problem.fix for problem in error.problems)
            assert not verdict.is_intact
            assert scan_run(self.run).skipped
            return False
        try:
            found = self.compose()
        except (RecipeError, SourceError, VerificationError) as error:  # the others may be of another attempt
            assert all(problem.where and problem.what and problem.fix for problem in error.problems)
            return False
        assert any(alike(found, right) for right in self.right)
        return True


def alike(one: States, other: States) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[state].view(torch.uint8), other[state].view(torch.uint8)) for state in one
    )


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("pristine")
    return {form: make_run(form, root / form) for form in FORMS}


@pytest.fixture(scope="module")
def right() -> dict[str, tuple[States, ...]]:
    """Form -> what its merges must yield, once it is known."""
    return {}


@pytest.fixture(params=FORMS)
def scene(
    request: pytest.FixtureRequest, pristine: dict[str, Path], tmp_path: Path, right: dict[str, tuple[States, ...]]
) -> Scene:
    made = Scene(pristine[request.param], tmp_path / "run", right.get(request.param))
    right[request.param] = made.right
    return made


def on_each(name: str, cases: Iterable[Any]) -> Any:
    """Try all cases on all forms; see `diagonal`."""
    return pytest.mark.parametrize(("scene", name), diagonal(FORMS, cases), indirect=["scene"])


@pytest.mark.parametrize("rounds", ROUNDS)
def test_any_value_of_the_manifest(scene, rounds):
    path, rng = scene.newest / "manifest.json", random.Random(1)
    content = path.read_bytes()
    harmless = json.dumps({**json.loads(content), "llmtailor_version": "0"}).encode()
    outcomes = set()
    for new in (harmless, *(mutate_content(content, b"{}", rng) for _ in range(rounds))):
        path.write_bytes(new)
        outcomes.add(scene.check())
    assert outcomes == {True, False}


@pytest.mark.parametrize("rounds", ROUNDS)
def test_any_value_of_the_trees(scene, rounds):
    bundle, manifest, rng = bundles(scene.newest)[0], scene.newest / "manifest.json", random.Random(2)
    raw, listed = bundle.read_bytes(), without_ranges(manifest.read_bytes())  # a longer header moves what follows
    outcomes = set()

    def change(header: Header) -> None:
        told = header["__metadata__"]
        key = rng.choice([key for key in told if key == "begin" or key.startswith("tree:")])
        told[key] = mutate_content(told[key].encode(), b"{}", rng).decode(errors="replace")

    for _ in range(rounds):
        bundle.write_bytes(raw)
        manifest.write_bytes(listed)
        edit_header(bundle, change)
        outcomes.add(scene.check())
    assert outcomes == {True, False}


@on_each("share", [0.0, 0.001, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99, 0.999])
def test_a_manifest_cut_short(scene, share):
    path = scene.newest / "manifest.json"
    text = path.read_bytes()
    path.write_bytes(text[: int(len(text) * share)])
    assert not scene.check()


@on_each(
    "text",
    [
        *(b"null", b"[]", b"{}", b'"x"', b"\xff\xfe", b"\0" * 100, b"[" * 100_000, b'{"a":' * 100_000),
        *(b"1" * 100_000, b"NaN", b'{"schema": "llmtailor.partial/2"}'),
    ],
)
def test_a_manifest_that_is_none(scene, text):
    (scene.newest / "manifest.json").write_bytes(text)
    assert not scene.check()


def test_a_key_that_is_there_twice(scene):
    path = scene.newest / "manifest.json"
    path.write_text(path.read_text().replace('"stage"', '"step": 1, "stage"', 1))
    assert not scene.check()


@on_each("name", ["../x.safetensors", "/etc/passwd", "config.json", "rank-00007-of-00002.safetensors"])
def test_names_of_bundles(scene, name):
    shutil.copy(bundles(scene.newest)[0], scene.run / "partial" / "x.safetensors")
    edit_manifest(scene.newest, lambda manifest: manifest["bundles"][0].update(path=name))
    assert not scene.check()
    edit_manifest(scene.newest, lambda manifest: manifest["bundles"].append(dict(manifest["bundles"][0])))
    assert not scene.check()


SYSTEM = {"$": "global", "module": "os", "name": "system"}
EVAL = {"$": "global", "module": "builtins", "name": "eval"}


def tensors(header: Header) -> list[str]:
    found = [key for key in header if key.startswith("exp_avg/")]
    return sorted(found, key=lambda key: header[key]["data_offsets"])


def rename_first(header: Header, name: Callable[[str], str]) -> None:
    key = tensors(header)[0]
    header[name(key)] = header.pop(key)


def swap(header: Header) -> None:
    one, *others = tensors(header)
    other = next(key for key in others if header[key]["shape"] != header[one]["shape"])
    header[one], header[other] = header[other], header[one]


def in_trees(change: Callable[[str], str]) -> Callable[[Header], None]:
    def edit(header: Header) -> None:
        told = header["__metadata__"]
        told.update({key: change(text) for key, text in told.items() if key.startswith("tree:")})

    return edit


def planted(node: Any) -> Callable[[Header], None]:
    return in_trees(lambda text: json.dumps({**json.loads(text), "planted": node}))


SENSELESS: dict[str, Callable[[Header], object]] = {
    "two tensors in the same bytes": lambda header: header[tensors(header)[0]].update(header[tensors(header)[1]]),
    "a gap": lambda header: header.pop(tensors(header)[0]) and None,
    "an unknown param": lambda header: rename_first(header, lambda key: "exp_avg/model.unknown.weight"),
    "an unknown kind": lambda header: rename_first(header, lambda key: f"weight/{key.partition('/')[2]}"),
    "another dtype": lambda header: header[tensors(header)[0]].update(dtype="I32"),
    "another shape": lambda header: header[tensors(header)[0]]["shape"].append(2),
    "tensors swapped": swap,
    "bytes beyond the end": lambda header: header[tensors(header)[-1]].update(data_offsets=[2**52, 2**52 + 4]),
    "no facts": lambda header: [header["__metadata__"].pop(key) for key in ("save_id", "step", "rank", "world_size")],
    "no class": planted(SYSTEM),
    "a call": planted({"$": "call", "func": EVAL, "args": ["1"], "new": False, "appends": [], "items": []}),
    "a deep tree": in_trees(lambda text: '{"$":"tuple","items":[' * 5000 + "]}" * 5000),
    "a tensor elsewhere": planted({"$": "tensor", "file": "../../../../etc/passwd", "key": "x"}),
    "whole tensors without names": lambda header: header["__metadata__"].update(whole="[[]]"),
    "a key twice": in_trees(lambda text: '{"x": 1, "x": 2, ' + text[1:]),
}


@on_each("title", SENSELESS)
def test_a_bundle_that_makes_no_sense(scene, title):
    def change(header: Header) -> None:
        SENSELESS[title](header)

    edit_header(bundles(scene.newest)[0], change)
    assert not scene.check()


@on_each("kind", ["folder", "pipe", "link to nowhere", "link to a device", "empty"])
def test_a_bundle_that_is_something_else(scene, kind):
    path = bundles(scene.newest)[0]
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "empty":
        path.touch()
        mend_manifest(path)
    else:
        path.symlink_to("/dev/zero" if kind == "link to a device" else "nowhere")
    assert not scene.check()


def test_a_bundle_may_be_a_link(scene):
    """As with any checkpoint; `inspect` notes it."""
    path = bundles(scene.newest)[0]
    path.symlink_to(path.rename(scene.run.parent / "elsewhere"))
    assert scene.check()
    assert any("symbolic links" in finding["what"] for finding in inspect_checkpoint(scene.newest)["findings"])


def drop_key(key: str) -> Callable[[Path], None]:
    return lambda newest: edit_manifest(newest, lambda manifest: manifest["ledger"].pop(key) and None)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "no manifest": lambda newest: (newest / "manifest.json").unlink(),
    "no JSON": lambda newest: (newest / "manifest.json").write_text("{"),
    "no lineage": drop_key("lineage"),
    "a save that was not": lambda newest: edit_manifest(newest, lambda all_: all_["ledger"].update(saves=HUGE)),
    "no holders": lambda newest: edit_manifest(newest, lambda all_: all_["ledger"].update(saves=0, held_by={})),
    "another save": lambda newest: edit_manifest(newest, lambda all_: all_.update(save_id="x")),
    "more ranks": lambda newest: edit_manifest(newest, lambda all_: all_.update(world_size=10**9)),
    "fewer parts": lambda newest: edit_manifest(newest, lambda all_: all_["parts"].pop() and None),
    "an empty bundle": lambda newest: bundles(newest)[0].write_bytes(b""),
    "config.json": lambda newest: (newest / "config.json").write_text("[]"),
    "trainer_state.json": lambda newest: (newest / "trainer_state.json").write_text("{"),
}
COMMANDS = (
    *("merge --step base --run {run} {run}/../made", "recipe {run}", "latest {run}", "salvage {run} --dry-run --deep"),
    *("thin {run} --strategy parity", "gc {run} --keep 1 --yes", "verify {newest} --deep", "inspect {newest}"),
)


@on_each("title", DAMAGES)
def test_no_command_trips_over_it(scene, title):
    kept = {path.name for path in partials(scene.run)[:-1]}
    DAMAGES[title](scene.newest)
    for command in COMMANDS:
        words = command.format(run=scene.run, newest=scene.newest).split()
        try:
            result = CliRunner().invoke(cli, words, catch_exceptions=False)
        except TailorError as error:
            assert error.exit_code in (4, 5, 7) and all(one.where and one.what for one in error.problems), command
        else:
            assert result.exit_code in (0, 7), (command, result.output)
    made = scene.run.parent / "made"
    found = {state: read(made, held) for state, held in index_checkpoint(made).held.items()}
    assert alike(found, scene.right[1])
    assert kept <= {path.name for path in partials(scene.run)}


def test_a_flipped_bit_is_noticed_by_reading(scene):
    """A merge compares what it reads of a bundle with the manifest's checksums of ranges."""
    index = index_checkpoint(scene.newest)
    held = next(held for held in index.held.values() if held.is_here)
    (fragment,) = held.place.cover(0, 1)
    flip(scene.newest / fragment.extent.path, fragment.extent.start)
    assert not verify_checkpoint(scene.newest, deep=True).is_intact
    with pytest.raises(SourceError, match="it is not as it was written"):
        scene.compose()


def without_ranges(manifest: bytes) -> bytes:
    content = json.loads(manifest)
    for one in content["bundles"]:
        del one["ranges"]
    return json.dumps(content).encode()


def test_merges_take_sources_by_their_name_too(scene):
    bundles(scene.newest)[0].write_bytes(b"")
    recipe = scene.run.parent / "recipe.yaml"
    recipe.write_text(f"base_checkpoint: {scene.newest}\n")
    with pytest.raises(TailorError):
        llmtailor.merge(recipe, scene.run.parent / "never")
    assert not (scene.run.parent / "never").exists()


def test_a_resumed_training_saves_again_what_is_lost(pristine, tmp_path):
    """The folder of step 2 is there, and can't be used: the next save holds its parts, whatever their turn."""
    run = shutil.copytree(pristine["saver"], tmp_path / "run")
    lost = {one["part"] for one in json.loads((partials(run)[1] / "manifest.json").read_text())["parts"]}
    turn = {one["part"] for one in json.loads((partials(run)[2] / "manifest.json").read_text())["parts"]}
    bundles(partials(run)[1])[0].write_bytes(b"")
    (partials(run)[1] / "manifest.json").write_text("{}")
    checkpoint = compose(run, 3, run / "checkpoint-3")
    attached = {"policy": "filter:first=1,last=0,every=9", "save_steps": 1}
    Alone(run, attached, prepare=freeze, max_steps=4).train(checkpoint)
    saved = {one["part"] for one in json.loads((run / "partial/step-00000004/manifest.json").read_text())["parts"]}
    assert lost <= saved and not turn <= saved
