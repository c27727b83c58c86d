"""DeepSpeed's own readers of its checkpoints, as judges that share no code with ours."""

from __future__ import annotations

import contextlib
import io
import shutil
from argparse import Namespace
from pathlib import Path

import torch

from llmtailor.model.roles import BUFFER, FROZEN, MASTER, State
from oracle.zero3 import MOMENTS, Snapshot, differ
from oracle.zero12 import MODEL

FILES = {"fp32": MASTER, **{moment: moment for moment in MOMENTS}}


def universal(checkpoint: Path, scratch: Path) -> dict[State, torch.Tensor]:
    """Run ``ds_to_universal``, whose tensors are flat for ZeRO-3. Not for elastic checkpoints, on which it fails, nor
    for ``round_robin_gradients``, which it gets wrong."""
    tag = (checkpoint / "latest").read_text()
    ds_to_universal(checkpoint / tag, scratch / "universal", (checkpoint / tag / MODEL).exists())
    return {
        State(path.parent.name, FILES[path.stem]): _load(path)
        for path in (scratch / "universal" / "zero").glob("*/*.pt")
        if path.stem != "step"
    }


def ds_to_universal(tag: Path, out: Path, inject_missing_state: bool = True) -> None:
    from deepspeed.checkpoint import ds_to_universal

    options = Namespace(
        input_folder=str(tag),
        output_folder=str(out),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=inject_missing_state,
    )
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        ds_to_universal.main(options)


def to_universal(source: Path, out: Path) -> Path:
    """Run ``ds_to_universal`` on a copy, of which only the universal checkpoint stays."""
    shutil.copytree(source, out)
    tag = (out / "latest").read_text()
    ds_to_universal(out / tag, out / f"{tag}_universal")
    shutil.rmtree(out / tag)
    (out / "latest").unlink()
    return out


def zero_to_fp32(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Run ``zero_to_fp32``: masters, frozen params, buffers and tied names, in fp32."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    with contextlib.redirect_stdout(io.StringIO()):
        return dict(get_fp32_state_dict_from_zero_checkpoint(str(checkpoint)))


def assert_universal_agrees(snapshot: Snapshot, checkpoint: Path, scratch: Path) -> None:
    """``ds_to_universal`` must read the same masters and moments out of a checkpoint."""
    theirs = universal(checkpoint, scratch)
    ours = {state: tensor for state, tensor in snapshot.states.items() if state.kind in FILES.values()}
    more: set[State] = set()
    if (checkpoint / (checkpoint / "latest").read_text() / MODEL).exists():  # ZeRO-1/2: the whole module is in there
        more = {
            State(name, MASTER) for name in [*snapshot.kind(FROZEN), *snapshot.kind(BUFFER), *snapshot.rest["tied"]]
        }
    assert theirs.keys() - more == ours.keys()
    wrong = {state: differ(theirs[state].flatten(), ours[state].flatten()) for state in ours}
    assert not any(wrong.values()), {state: difference for state, difference in wrong.items() if difference}


def assert_zero_to_fp32_agrees(snapshot: Snapshot, checkpoint: Path) -> None:
    """``zero_to_fp32`` must read the same masters and frozen params out of a checkpoint, under all names."""
    theirs = zero_to_fp32(checkpoint)
    ours = snapshot.kind(MASTER) | {name: tensor.float() for name, tensor in snapshot.kind(FROZEN).items()}
    ours |= {alias: ours[name] for alias, name in snapshot.rest["tied"].items()}
    ours |= {name: copies[0].float() for name, copies in snapshot.kind("buffer").items()}
    assert theirs.keys() == ours.keys()
    wrong = {name: differ(theirs[name].float(), ours[name]) for name in ours}
    assert not any(wrong.values()), {name: difference for name, difference in wrong.items() if difference}


def _load(path: Path) -> torch.Tensor:
    loaded = torch.load(path, weights_only=False)
    return loaded if isinstance(loaded, torch.Tensor) else loaded["param"]
