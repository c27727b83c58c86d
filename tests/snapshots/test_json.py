"""What every ``--json`` prints and every JSON file that is written: keys and types, of real documents."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from attempts.world import World
from helpers.checkpoints import make, model_states, optim_states
from helpers.commands import run_here
from helpers.snapshots import check, schema
from thin.scene import make_run

MAPS = {
    "inspect": ["parts[].num_bytes_by_kind", "tied"],
    "partial manifest": ["params", "tied", "saved_as", "policy", "ledger.held_by", "ledger.history", "setback"],
    "saves.jsonl": ["parts", "drift", "expected_loss", "steps_behind"],
    "attempts.json": ["attempts[].history"],
    "llmtailor.json": ["attempt.history"],
    "attempt in trainer_state.json": ["attributes.history"],
    "thin": ["checkpoints[].parts"],
}
"""Where the keys are data"""

Documents = dict[str, list[Any]]


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Documents:
    """All documents, by kind."""
    root = tmp_path_factory.mktemp("documents")
    found: Documents = {}

    def call(*words: object, code: int = 0, kind: str = "") -> dict[str, Any]:
        done = run_here(*words, "--json", cwd=root)
        assert done.returncode == code, done.stderr
        found.setdefault(kind or str(words[0]), []).append(json.loads(done.stdout))
        return dict(found[kind or str(words[0])][-1])

    def written(kind: str, path: Path) -> None:
        found.setdefault(kind, []).append(json.loads(path.read_text()))

    full = [make(root / "run", step) for step in (100, 200, 300)]
    recipe = root / "recipe.yaml"
    recipe.write_text(
        "merge_method: passthrough\nbase_model: run/checkpoint-300\n"
        "parts:\n  - {from: run/checkpoint-200, select: [odd, embed_tokens]}\n"
    )
    call("merge", recipe, "--dry-run")
    call("merge", recipe, "out", "--checksum")
    call("merge", recipe, "out-plain", "--stage", "none", "--num-gpu", 1)
    call("merge", "--run", "run", kind="merge --run")
    call("merge", "--run", "run", "--at", 250, "--strategy", "parity", "--step", "base", kind="merge --run")
    call("convert", full[0], "converted", "--num-gpu", 3)
    call("convert", full[0], "converted-2", "--stage", 2, "--groups", "layer", "--dry-run")
    written("llmtailor.json", root / "out" / "llmtailor.json")
    written("llmtailor.json", root / "out-plain" / "llmtailor.json")

    salvaged = [shutil.copytree(root / "run", root / f"damaged-{number}") for number in range(3)]
    call("salvage", root / "run", "--dry-run")
    (salvaged[1] / "checkpoint-300" / "scheduler.pt").unlink()
    optim_states(salvaged[2] / "checkpoint-300", 1).unlink()
    call("verify", salvaged[2] / "checkpoint-300", code=7)
    call("latest", salvaged[2])
    call("salvage", salvaged[1])
    call("salvage", salvaged[2], "--replace", "--deep")
    written("llmtailor.json", salvaged[1] / "salvaged-checkpoint-200" / "llmtailor.json")
    model_states(full[2]).write_bytes(b"")
    call("inspect", full[0])
    call("inspect", "out-plain")
    call("verify", full[0], "--deep")
    call("verify", "out", "--deep")
    call("verify", full[2], code=7)
    (salvaged[0] / "checkpoint-300" / "trainer_state.json").unlink()
    for path in salvaged[0].glob("checkpoint-[12]00"):
        shutil.rmtree(path)
    call("latest", salvaged[0], code=7)

    thinned = shutil.copytree(salvaged[1], root / "thinned")
    for path in thinned.glob("*checkpoint-*"):
        if path.name not in ("checkpoint-100", "checkpoint-200"):
            shutil.rmtree(path)
    make(thinned, 400)
    call("thin", thinned, "--keep-optimizer-last", 2)
    call("thin", thinned, "--strategy", "parity", "--yes")
    make_run(root / "linked", (100, 200, 300), "dcp")
    call("thin", "linked", "--strategy", "parity", "--reference", "--yes")
    written("partial manifest", thinned / "partial" / "step-00000200" / "manifest.json")

    world = World(root / "saved", seed=1)
    world.start(None, 0, None)
    for _ in range(4):
        world.train(10)
        world.save()
    world.save_full()
    world.train(10)
    world.save()
    call("gc", world.run, "--keep", 1)
    resume_from = world.compose(30)
    assert resume_from is not None
    written("llmtailor.json", resume_from / "llmtailor.json")
    world.resume_from(resume_from, 30)
    world.train(10)
    world.save()
    world.stop()
    call("gc", world.run)
    call("policy", root / "run" / "checkpoint-100")
    call("latest", world.run)
    partials = sorted(world.run.glob("partial/step-*/manifest.json"))
    call("inspect", partials[0].parent)
    call("verify", partials[-1].parent, "--deep")
    for path in partials:
        written("partial manifest", path)
    written("attempts.json", world.run / "partial" / "attempts.json")
    for name in ("saves.jsonl", "saves.abandoned.jsonl"):
        lines = (world.run / "partial" / name).read_text().splitlines()
        found.setdefault("saves.jsonl", []).extend(map(json.loads, lines))
    for path in (resume_from, world.run / "checkpoint-40"):
        state = json.loads((path / "trainer_state.json").read_text())
        found.setdefault("attempt in trainer_state.json", []).append(state["stateful_callbacks"]["llmtailor"])
    return found


def test_keys_and_types(documents: Documents) -> None:
    check("json", {kind: schema(found, MAPS.get(kind, ())) for kind, found in sorted(documents.items())})
