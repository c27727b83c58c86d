"""Starts an attempt of a run: from the newest state, on all ranks, if a job is started again; with the record of saves
to continue, and abandoned checkpoints moved aside."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtailor.background.report import abandon_after
from llmtailor.checkpoint.lineage import Ledger, lost_parts
from llmtailor.errors import TargetError
from llmtailor.formats.partial.manifest import read_manifest
from llmtailor.formats.provenance import stated_attempt
from llmtailor.frameworks.files import MANIFEST
from llmtailor.frameworks.trainer_state import read_mark
from llmtailor.live.training import Training
from llmtailor.model.parts import Part
from llmtailor.patching import patch_method
from llmtailor.ranks.errors import as_error, from_json, to_json
from llmtailor.ranks.store import await_messages
from llmtailor.ranks.team import Ranks
from llmtailor.runs.composing import compose_newest
from llmtailor.runs.folder import RunFolder
from llmtailor.runs.scan import continues
from llmtailor.storage.local import as_path

if TYPE_CHECKING:
    from transformers import Trainer

logger = logging.getLogger("llmtailor.saving")
_numbers = count()


def newest_checkpoint(output_dir: str | Path, also: Sequence[str | Path] = ()) -> Path | None:
    """Compose the newest state of a run, and return the checkpoint to resume from. Call it on every rank.

    Rank 0 composes for the current number of ranks, however long that takes; the others wait for it. A complete
    checkpoint that has the newest state is returned as it is. Returns None if no save of the run is complete, so that
    training starts from scratch.

    Args:
        output_dir: the run's folder.
        also: staging folders of the run.

    Raises:
        TailorError: the newest state can't be composed; the same on every rank.
    """
    ranks = Ranks.here()
    run, others = Path(output_dir), [Path(one) for one in also if (Path(one) / "partial").is_dir()]
    # not by a collective: those have a time limit
    store, key = ranks.store(), f"restart-{next(_numbers)}"
    if ranks.is_first:
        try:
            newest = compose_newest(run, ranks.world_size, others)
            store.set(key, {"path": str(newest.path) if newest is not None else None})
        except Exception as error:
            refusal = as_error(error, "newest_checkpoint")
            store.set(key, {"error": to_json(refusal)})
            raise refusal from error
        if newest is not None:
            how = "composed" if newest.is_new else "already complete"
            logger.warning("resuming at step %d from %s (%s)", newest.step, newest.path, how)
    (message,) = await_messages(store, [key], lambda: None)
    if "error" in message:
        raise from_json(message["error"])
    return Path(message["path"]) if message["path"] is not None else None


def resume_automatically(trainer: Trainer, also: Sequence[str | Path] = ()) -> None:
    """Make ``trainer.train()`` continue from the newest state of its ``output_dir``.

    A callback would come too late: when `on_train_begin` runs, the Trainer has decided where the data begins. So this
    replaces the method on this one Trainer. A checkpoint that the caller names is kept, unless the newest attempt
    descends from it: a restarted job names the same one again.
    """

    @patch_method(trainer, "train")
    def resuming(
        train: Callable[..., Any], resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        output_dir, given = Path(trainer.args.output_dir), resume_from_checkpoint
        named = None if given is None or isinstance(given, bool) else Path(given)
        is_open = named is None or Ranks.here().run_on_first(lambda: continues(output_dir, named))
        if is_open and kwargs.get("trial") is None and (newest := newest_checkpoint(output_dir, also)):
            given = str(newest)
        return train(given, *args, **kwargs)


def resume(
    folder: RunFolder,
    training: Training,
    *,
    parts: Collection[Part],
    step: int,
    lineage: str,
    resumed_from: str | Path | Mapping[str, object] | None,
    is_retry: bool,
    policy: Mapping[str, object],
) -> tuple[Ledger, Path | None]:
    """Start an attempt at a step: record it, and move aside the checkpoints that it abandons.

    Return its ledger before its first save, which without a record to continue holds only the past, and the partial
    checkpoint at this step that it continues, if any.

    ``parts`` are those that it saves. ``resumed_from`` is a checkpoint, or the content of its ``trainer_state.json``;
    None means the run's newest checkpoint at that step. ``is_retry``: what is there is of earlier attempts of the same
    training. ``policy`` are the settings of the policy from now on.

    Raises TargetError if training starts from scratch where another run has saved, SourceError for a damaged record of
    attempts, StorageError.
    """
    if swept := folder.sweep():
        logger.warning("removed %s: these saves did not finish", ", ".join(swept))
    there = folder.complete()
    if step == 0 and not is_retry and there:
        what = f"another run has saved here, up to step {max(there)}"
        fix = (
            'resume from it (llmtailor merge --run, or attach with on_restart="compose"), use another output_dir for '
            "this run, or move the folder elsewhere"
        )
        raise TargetError.at(folder.partial, what, fix)
    before = there.get(step)
    if isinstance(resumed_from, Mapping):
        stated = read_mark(resumed_from, step)
    else:
        stated = stated_attempt(folder.run / f"checkpoint-{step}" if resumed_from is None else as_path(resumed_from))
    if before is not None and (resumed_from is None or stated_attempt(before) == stated):
        manifest = read_manifest(before, before.name)
        saved = Ledger.from_json(manifest.ledger, before.name)
        ledger = saved.resumed(lineage, step)
        earlier = {key: value for key, value in manifest.policy.items() if key != "max_staleness"}
        if earlier not in ({}, json.loads(json.dumps(policy))) and not manifest.is_thinned:
            what = "the saves so far were chosen by the policy %s, the next ones are by %s; to keep it, give policy=%r"
            logger.warning(what, spec_of(earlier), spec_of(policy), spec_of(earlier))
        if dict(manifest.params) == dict(training.params) and dict(manifest.tied) == dict(training.tied):
            ledger = ledger.divided(parts, lost_parts(saved, folder.saves()))
        else:
            what = "%s is of another model or set of trained params; the next save holds every part"
            logger.warning(what, before.name)
            ledger = Ledger(lineage, ledger.history)
    else:
        before = None
        ledger = Ledger(lineage, {**stated.history, stated.lineage: step} if stated else {})
    ledger = replace(ledger, missed=stated.missed if stated else {})
    folder.record_attempt(ledger.past(step))
    _set_aside(folder, step, before)
    abandon_after(folder.partial, step)
    return ledger, before


def spec_of(settings: Mapping[str, object]) -> str:
    """Return the settings of a policy as `make_policy` reads them."""
    options = ",".join(f"{key}={value}" for key, value in settings.items() if key != "name")
    return f"{settings.get('name')}:{options}" if options else f"{settings.get('name')}"


def _set_aside(folder: RunFolder, step: int, before: Path | None) -> None:
    """Move abandoned partial checkpoints and composites aside; warn about the Trainer's full ones."""
    saves = [path for number, path in folder.complete().items() if number > step or (number == step and path != before)]
    full = [path for number, path in folder.full().items() if number > step]
    composites = [path for path in full if (path / MANIFEST).is_file() and not path.is_symlink()]
    folder.set_aside([*saves, *composites])
    how = f"resuming at step {step}" if step else "starting again from scratch"
    if moved := [path.name for path in (*saves, *composites)]:
        logger.warning("%s: moved abandoned checkpoints aside: %s", how, ", ".join(moved))
    if left := [path.name for path in full if path not in composites]:
        what = "belong to an abandoned attempt; llmtailor skips them, resume_from_checkpoint=True does not"
        logger.warning("%s: %s %s", how, ", ".join(left), what)
