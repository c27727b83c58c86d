"""Attests a program that nobody edits, for ``llmtailor attest`` and ``llmtailor run --attest``.

The ``sitecustomize`` of ``llmtailor run`` calls `HOOKS` when the program imports the modules that load checkpoints and
take steps. They are imported by launchers as well, so this module imports neither torch nor transformers.

A Trainer is attested by a callback, `launched.LaunchedAttest`; for Lightning's, `lightning.LaunchedLightningAttest`
says what was loaded. Other loops are attested before the first optimizer step after ``engine.load_checkpoint`` or
accelerate's ``load_state``: only buffers may have changed before, so they are kept."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from llmtailor.attestation.hooks import PROCESS_HOOKS
from llmtailor.errors import TailorError, UsageError
from llmtailor.patching import patch_method, replaced

if TYPE_CHECKING:
    from llmtailor.attestation.report import Attestation
    from llmtailor.live.training import TrainingObjects
    from llmtailor.ranks.team import Ranks

Call = Callable[..., Any]
ATTESTING = "LLMTAILOR_ATTESTING"
"""The variable that makes a launched program attest instead of save: a JSON object, see `Task`"""
_FIX_RESUME = "make PROGRAM resume from it, as by --resume_from_checkpoint, with an absolute path"


@dataclass(frozen=True, slots=True)
class Task:
    """What a launched program is to do."""

    checkpoint: str | None = None
    """The checkpoint that it must resume from; None if the training is to continue after it was attested"""
    result: str | None = None
    """The file that each rank then writes"""

    @classmethod
    def here(cls) -> Task:
        return cls(**json.loads(os.environ.get(ATTESTING) or "{}"))

    def to_text(self) -> str:
        return json.dumps({"checkpoint": self.checkpoint, "result": self.result})


@dataclass
class _Loaded:
    """What was loaded since the last optimizer step."""

    checkpoint: Path | None = None
    find_objects: Callable[[], TrainingObjects] | None = None
    """Returns what holds the training"""
    is_making_states: bool = False
    """Whether torch makes an optimizer's states by a step with a rate of 0, to load them"""


_loaded = _Loaded()
_task: Task | None = None


def remember(checkpoint: Path, find_objects: Callable[[], TrainingObjects]) -> None:
    """Attest a training, which holds what was loaded from a checkpoint, before its next optimizer step."""
    _loaded.checkpoint, _loaded.find_objects = checkpoint, find_objects


def forget() -> None:
    """Leave what was loaded to somebody else who attests it."""
    _loaded.checkpoint, _loaded.find_objects = None, None


def _hook_engine(module: ModuleType) -> None:
    @patch_method(module.DeepSpeedEngine, "load_checkpoint")
    def loading(load: Call, self: Any, load_dir: str, tag: str | None = None, *args: Any, **kwargs: Any) -> Any:
        from llmtailor.frameworks.files import LATEST, tag_in
        from llmtailor.live.objects import kept_buffers
        from llmtailor.live.training import TrainingObjects

        result = load(self, load_dir, tag, *args, **kwargs)
        if result[0] is not None:  # else it has only logged that there is no checkpoint
            folder = Path(load_dir)
            is_newest = tag is None or tag_in(folder / LATEST) == str(tag)
            buffers = kept_buffers(TrainingObjects(engine=self))
            remember(folder if is_newest else folder / str(tag), lambda: TrainingObjects(engine=self, buffers=buffers))
        return result

    @patch_method(module.DeepSpeedEngine, "step")
    def stepping(step: Call, *args: Any, **kwargs: Any) -> Any:
        _before_step()
        return step(*args, **kwargs)


def _hook_accelerator(module: ModuleType) -> None:
    @patch_method(module.Accelerator, "load_state")
    def loading(load: Call, self: Any, *args: Any, **kwargs: Any) -> Any:
        from llmtailor.live.objects import kept_buffers, prepared

        folders: list[str] = []  # accelerate may choose the folder itself
        hook = self.register_load_state_pre_hook(lambda _, folder: folders.append(str(folder)))
        try:
            result = load(self, *args, **kwargs)
        finally:
            hook.remove()
        if folders:
            buffers = kept_buffers(prepared(self))
            remember(Path(folders[-1]), lambda: replace(prepared(self), buffers=buffers))
        return result


def _hook_scaler(module: ModuleType) -> None:
    @patch_method(module.GradScaler, "step")
    def stepping(step: Call, *args: Any, **kwargs: Any) -> Any:
        _before_step()  # the optimizer's step is left out if gradients overflow, which changes the scale
        return step(*args, **kwargs)


def _hook_optimizer(module: ModuleType) -> None:
    module.register_optimizer_step_pre_hook(_before_update)
    if task().checkpoint is not None:
        PROCESS_HOOKS.take, PROCESS_HOOKS.before_saving = _take, _before_step


def _before_update(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    """Attest before an optimizer updates the params: after the closure that it is given, as by Lightning, which calls
    callbacks in it. Returns other arguments for the optimizer's step."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if not _is_due() or not callable(closure):
        _before_step()
        return None

    def closing(*args: Any, **kwargs: Any) -> Any:
        result = closure(*args, **kwargs)
        _before_step()
        return result

    if "closure" in kwargs:
        return args, {**kwargs, "closure": closing}
    return (args[0], closing, *args[2:]), kwargs


def _hook_state_dict(module: ModuleType) -> None:
    @patch_method(module, "_init_optim_state")
    def making(make: Call, *args: Any, **kwargs: Any) -> Any:
        with replaced(_loaded, "is_making_states", True):
            return make(*args, **kwargs)


def _take(found: Attestation, *_: object) -> None:
    """End the program with what it has attested itself."""
    attest_and_end(Path(found.checkpoint), lambda: found)


def task() -> Task:
    """Return the task of this process, which its environment does not change."""
    global _task
    _task = _task or Task.here()
    return _task


HOOKS: Mapping[str, Callable[[ModuleType], None]] = {
    "deepspeed.runtime.engine": _hook_engine,
    "accelerate.accelerator": _hook_accelerator,
    "torch.amp.grad_scaler": _hook_scaler,
    "torch.optim.optimizer": _hook_optimizer,
    "torch.distributed.checkpoint.state_dict": _hook_state_dict,
}
"""Module -> what is called once it was imported"""


def _is_due() -> bool:
    is_pending = _loaded.find_objects is not None or task().checkpoint is not None
    return is_pending and not _loaded.is_making_states


def _before_step() -> None:
    """Attest what was loaded, if anything, before an optimizer step."""
    if not _is_due():
        return
    loaded, find_objects = _loaded.checkpoint, _loaded.find_objects
    from llmtailor.live.attesting import attest_loop, attest_objects
    from llmtailor.saving.arguments import resume_options

    options = resume_options(os.environ)
    forget()

    def attest() -> Attestation:
        assert find_objects is not None and loaded is not None
        return attest_objects(find_objects(), loaded, options.attest)

    if task().checkpoint is None:
        attest_loop(attest, loaded, options.on_mismatch, say=announce_or_leave)
    else:
        attest_and_end(loaded, attest)


def announce_or_leave(result: Attestation, ranks: Ranks, on_mismatch: str) -> None:
    """Say what was found; if that is to stop the training, end this process as a command of llmtailor ends, without a
    traceback on every rank."""
    from llmtailor.attestation.check import NotTheSame, announce

    try:
        announce(result, ranks, on_mismatch)
    except NotTheSame as error:
        if ranks.is_first:
            print(f"error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(error.exit_code) from None


def attest_and_end(loaded: Path | None, attest: Callable[[], Attestation]) -> NoReturn:
    """End the program with what an attestation returns or raises; or because it has not resumed as it must."""
    check_resumed(loaded)
    try:
        found = attest()
    except Exception as error:
        end_with_error(error)
    end(found)


def check_resumed(loaded: Path | None) -> None:
    """End the program if it has not resumed from the checkpoint of its task."""
    from llmtailor.frameworks.files import LATEST, tag_in

    checkpoint = task().checkpoint
    assert checkpoint is not None
    wanted = Path(checkpoint).resolve()
    if loaded is None:
        what = "PROGRAM reached its first optimizer step without resuming"
        fix = f"{_FIX_RESUME}; if it loads in its own way, call llmtailor.attest after loading"
        end_with_error(UsageError.at(checkpoint, what, fix))
    at = loaded.resolve()
    is_tag = wanted.parent == at and tag_in(at / LATEST) == wanted.name  # named by the folder around it
    if at != wanted and not is_tag:
        end_with_error(UsageError.at(checkpoint, f"PROGRAM has resumed from {loaded} instead", _FIX_RESUME))


def end(found: Attestation) -> NoReturn:
    """Write what was found and end the program on all ranks."""
    from llmtailor.attestation.report import lines_of

    _end({"is_same": found.is_same, "lines": lines_of(found), "attested": found.to_json()})


def end_with_error(error: Exception) -> NoReturn:
    """Write why nothing could be compared and end the program on all ranks."""
    from llmtailor.ranks.errors import to_json

    if not isinstance(error, TailorError):
        fix = "check it with llmtailor verify; if it is resumable, this is a bug in llmtailor: please report it"
        error = TailorError.at(task().checkpoint, f"it can't be attested: {type(error).__name__}: {error}", fix)
    _end(to_json(error))


def _end(result: Mapping[str, object]) -> NoReturn:
    """End the process at once, with exit code 0 so that a launcher reports no failure: the program's own handlers could
    catch an exception, and threads could keep it alive."""
    from llmtailor.ranks.team import Ranks

    ranks, to = Ranks.here(), task().result
    with suppress(OSError, RuntimeError):  # another node may lack the folder, and another rank may have died
        if to is not None:  # all ranks write the same, because each node may have a launcher of its own
            own = Path(f"{to}.{ranks.rank}")
            own.write_text(json.dumps(result))
            own.replace(to)
        ranks.final_barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
