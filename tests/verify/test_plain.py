"""The Trainer without DeepSpeed, whose resume checks almost nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("accelerate")
pytestmark = pytest.mark.real

from safetensors.torch import load_file, save_file  # noqa: E402

from llmtailor.errors import UnsupportedCheckpoint  # noqa: E402
from llmtailor.findings import SEVERITIES  # noqa: E402
from llmtailor.verify.verify import RESUMABLE, verify_checkpoint  # noqa: E402
from trainings.alone import NamedGroups, train  # noqa: E402

DOCS = Path(__file__).parents[2] / "docs" / "findings.md"


def freeze_embeddings(model):
    model.get_input_embeddings().weight.requires_grad_(False)


RUNS = {
    "llama": {"arch": "llama"},
    "qwen2-tied": {"arch": "qwen2", "tied": True},
    "bf16": {"arch": "llama", "dtype": torch.bfloat16},
    "frozen": {"arch": "llama", "prepare": freeze_embeddings},
    "named": {"arch": "llama", "kind": NamedGroups},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return {name: train(tmp_path_factory.mktemp(name), **how) for name, how in RUNS.items()}


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("deep", [False, True])
def test_what_the_trainer_saves_is_resumable(trained, name, deep):
    for step in (2, 4):
        verdict = verify_checkpoint(trained[name].checkpoint(step), deep=deep)
        assert verdict.level == RESUMABLE
        assert [finding.severity for finding in verdict.findings] == (["note"] if name == "frozen" else [])
        assert not verdict.damage.files and not verdict.damage.states


def edit(path, change):
    tree = torch.load(path, weights_only=True)
    change(tree)
    torch.save(tree, path)


def optimizer(change):
    return lambda root: edit(root / "optimizer.pt", change)


def unlink(*names):
    return lambda root: [(root / name).unlink() for name in names]


def without_a_layer(root):
    tensors = load_file(root / "model.safetensors")
    save_file({name: one for name, one in tensors.items() if ".layers.1." not in name}, root / "model.safetensors")


def swap(first, second):
    def change(tree):
        tree["state"][first], tree["state"][second] = tree["state"][second], tree["state"][first]

    return optimizer(change)


def cast(tree):
    for state in tree["state"].values():
        state["exp_avg"] = state["exp_avg"].half()


def more_ids(tree):
    tree["state"][len(tree["state"])] = tree["state"][0]
    tree["param_groups"][1]["params"].append(len(tree["state"]) - 1)


def split_weights(root):
    tensors = load_file(root / "model.safetensors")
    names = sorted(tensors)
    parts = {"a-part.safetensors": names[::2], "another.safetensors": names[1::2]}
    for path, part in parts.items():
        save_file({name: tensors[name] for name in part}, root / path)
    weight_map = {name: path for path, part in parts.items() for name in part}
    (root / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (root / "model.safetensors").unlink()


def spoil(root):
    tensors = load_file(root / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, root / "model.safetensors", {"format": "pt"})


def swap_hyper(tree):
    first, second = tree["param_groups"]
    first["params"], second["params"] = second["params"], first["params"]
    tree["param_groups"] = [second, first]


def swap_ids(tree):
    ids = tree["param_groups"][0]["params"]
    ids[1], ids[2] = ids[2], ids[1]


def at_step(step, *numbers):
    return optimizer(
        lambda tree: [tree["state"][number].update(step=torch.tensor(float(step))) for number in numbers] and None
    )


def hyper(**values):
    return optimizer(lambda tree: [group.update(values) for group in tree["param_groups"]])


def add_old_weights(root):
    torch.save(load_file(root / "model.safetensors"), root / "pytorch_model.bin")


def save_scale(root):
    torch.save({"scale": 2.0, "growth_factor": 2.0}, root / "scaler.pt")


def as_ints(root):
    tensors = load_file(root / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].int()
    save_file(tensors, root / "model.safetensors", {"format": "pt"})


def moments_as_ints(tree):
    tree["state"][0]["exp_avg"] = tree["state"][0]["exp_avg"].int()


CASES = {
    "plain: base_lrs not the initial_lr of the param groups": (
        "error",
        "it starts from learning rate",
        lambda root: edit(root / "scheduler.pt", lambda tree: tree.update(base_lrs=[1.0, 1.0])),
    ),
    "plain: hyperparameters of the param groups swapped": (
        "error",
        "only vectors have weight decay",
        optimizer(swap_hyper),
    ),
    "plain: ids of the params out of order": ("error", "out of order", optimizer(swap_ids)),
    "plain: eps missing": (
        "error",
        "eps is missing",
        optimizer(lambda tree: [group.pop("eps") for group in tree["param_groups"]]),
    ),
    "plain: lr NaN": ("error", "lr is nan", hyper(lr=float("nan"))),
    "plain: amsgrad without its states": ("error", "max_exp_avg_sq is missing", hyper(amsgrad=True)),
    "plain: Adam's step of a param beyond the schedule's": ("error", "is 99, but the schedule", at_step(99, 0)),
    "plain: Adam's step of a param 0": ("warning", "is 0, but the schedule", at_step(0, 0)),
    "plain: Adam's step of one param alone behind": ("warning", "is 1, but the schedule", at_step(1, 0)),
    "plain: integers for a moment": ("error", "not floating-point", optimizer(moments_as_ints)),
    "plain: integers for a weight": ("error", "not floating-point", as_ints),
    "plain: pytorch_model.bin beside shards of safetensors": (
        "error",
        "two sets of weights",
        lambda root: (add_old_weights(root), split_weights(root)),
    ),
    "plain: pytorch_model.bin beside model.safetensors": (None, "", add_old_weights),
    "plain: a folder of FSDP": ("error", "belongs to an FSDP", lambda root: (root / "pytorch_model_fsdp_0").mkdir()),
    "plain: scaler.pt of a run without fp16": ("error", "without a loss scale", save_scale),
    "plain: no scheduler.pt": ("error", "loads neither the schedule nor the optimizer", unlink("scheduler.pt")),
    "plain: no optimizer.pt": ("error", "the file is missing", unlink("optimizer.pt")),
    "plain: neither of them": ("error", "no optimizer state", unlink("optimizer.pt", "scheduler.pt")),
    "plain: no trainer_state.json": ("error", "the file is missing", unlink("trainer_state.json")),
    "plain: no training_args.bin": (None, "", unlink("training_args.bin")),
    "plain: no RNG state": ("warning", "there are no RNG states", unlink("rng_state.pth")),
    "plain: no weights": ("error", "there are no weights", unlink("model.safetensors")),
    "plain: weights lack a layer": ("error", "a resume would keep their initial values", without_a_layer),
    "plain: weights in files of any name, by an index": (None, "", split_weights),
    "plain: states of some ids missing": (
        "note",
        "a resume starts from zero moments there",
        optimizer(lambda tree: [tree["state"].pop(number) for number in (1, 3)]),
    ),
    "plain: states of all ids missing": (
        "error",
        "no states, but the schedule is at step 4",
        optimizer(lambda tree: tree["state"].clear()),
    ),
    "plain: exp_avg_sq of a param missing": (
        "error",
        "state[1].exp_avg_sq is missing",
        optimizer(lambda tree: tree["state"][1].pop("exp_avg_sq")),
    ),
    "plain: states of different shapes swapped": ("error", "the state of id 0 has shape", swap(0, 3)),
    "plain: a param group with more ids": ("error", "such params", optimizer(more_ids)),
    "plain: moments in another dtype": ("warning", "a resume casts it", optimizer(cast)),
    "plain: optimizer.pt of another step": (
        "error",
        "the schedule is at step 4",
        optimizer(lambda tree: [state.update(step=torch.tensor(2.0)) for state in tree["state"].values()]),
    ),
    "plain: trainer_state.json of another step": (
        "error",
        "global_step is 3",
        lambda root: (root / "trainer_state.json").write_text('{"global_step": 3}'),
    ),
    "plain: scheduler.pt with fewer entries": (
        "error",
        "1 learning rates for 2 param groups",
        lambda root: edit(root / "scheduler.pt", lambda tree: tree.update(base_lrs=[1.0], _last_lr=[1.0])),
    ),
    "plain: config.json cut short": ("error", "not JSON", lambda root: (root / "config.json").write_text("{")),
    "plain: NaN among the weights (--deep)": ("error", "the master of model.norm.weight is not finite", spoil),
}


@pytest.mark.parametrize("title", CASES)
def test_a_damage_is_told(trained, title, tmp_path):
    severity, told, change = CASES[title]
    root = tmp_path / "checkpoint-4"
    shutil.copytree(trained["llama"].checkpoint(4), root)
    change(root)
    verdict = verify_checkpoint(root, deep="--deep" in title)
    if severity is None:
        assert not verdict.findings
        return
    found = [finding for finding in verdict.findings if told in finding.what]
    assert found, "\n".join(map(str, verdict.findings))
    assert (
        found[0].severity == severity == min(verdict.findings, key=lambda one: SEVERITIES.index(one.severity)).severity
    )


def test_what_cannot_be_judged_is_not_called_unresumable(trained, tmp_path):
    root = tmp_path / "checkpoint-4"
    shutil.copytree(trained["llama"].checkpoint(4), root)
    (root / "config.json").unlink()  # a stock resume does without, but it alone tells the order of the params
    with pytest.raises(UnsupportedCheckpoint, match="nothing else states the params' order"):
        verify_checkpoint(root)


def test_states_of_equal_shape_swapped_cannot_be_seen(trained, tmp_path):
    root = tmp_path / "checkpoint-4"
    shutil.copytree(trained["llama"].checkpoint(4), root)
    ids = [
        number for number, state in torch.load(root / "optimizer.pt")["state"].items() if state["exp_avg"].dim() == 1
    ]
    swap(*ids[:2])(root)
    assert verify_checkpoint(root, deep=True).level == RESUMABLE  # as docs/findings.md says


def test_the_page_lists_these_damages():
    text = DOCS.read_text()
    for title, (severity, _, _) in CASES.items():
        assert f"| {title} | {severity or '-'} |" in text
