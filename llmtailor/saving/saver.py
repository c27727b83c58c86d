"""Saves the parts that a policy chooses, so that any step after the first save can be composed.

One save is the same few moves on every rank::

    measure drift -> choose parts (rank 0, told to all) -> each rank writes its bundle, fsynced
    -> all say whether that went well -> rank 0 writes the manifest last, or removes everything

A save that fails for want of space or a sick disk is given up with a warning; the training goes on, and so does the
record of what older saves hold.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from llmtailor.errors import Problem, SourceError, StorageError, TailorError, TargetError, UnsupportedCheckpoint
from llmtailor.formats.partial.container import is_partial
from llmtailor.formats.partial.manifest import BundleFact, read_manifest
from llmtailor.formats.trainer import SCHEDULER, TRAINER_STATE
from llmtailor.history.ledger import Ledger
from llmtailor.history.retention import SaveRecord, check_keep, deletable, lost_parts
from llmtailor.policies import Policy, Situation, check_policy, choose, make_policy, restore_state, state_of
from llmtailor.saving.carried import CarriedFiles
from llmtailor.saving.drift import Drift
from llmtailor.saving.log import SaveReport, append
from llmtailor.saving.model import dissect_training, weigh
from llmtailor.saving.ranks import Ranks
from llmtailor.saving.training import Training, rng_tree
from llmtailor.saving.writing import SaveId, check_trees, publish, write_frozen, write_rank
from llmtailor.store import Folder

logger = logging.getLogger("llmtailor.saving")


class SaveFailed(StorageError):
    """A save was given up; nothing of it is left, and the training can go on."""


class PartialSaver:
    """Writes partial checkpoints of a training below ``<output_dir>/partial``. All ranks make the same calls.

    ``policy`` is a name (``parity``), a name with options (``filter:first=2,last=2``) or an object; no part becomes
    older than ``max_staleness`` saves. With ``keep_composable`` partial checkpoints that the newest so many composable
    steps no longer need are deleted. ``carried`` have ``save_pretrained``: config, tokenizer.

    Raises UsageError for a policy that can't guarantee that any step is composable or options that make no sense,
    UnsupportedCheckpoint for a training whose states can't be saved in parts, TargetError if another run saves into
    the same folder; the same on every rank.
    """

    def __init__(
        self,
        output_dir: str | Path,
        training: Training,
        policy: str | Mapping[str, Any] | Policy = "parity",
        *,
        scheduler: Any = None,
        max_staleness: int | None = None,
        keep_composable: int | None = None,
        carried: Iterable[Any] = (),
    ) -> None:
        check_keep(keep_composable)
        self.folder = Folder(Path(output_dir))
        self.training = training
        self.scheduler = scheduler
        self.policy = make_policy(policy)
        self.keep_composable = keep_composable
        self.ranks = Ranks.here()
        self.carried = CarriedFiles(*carried)
        self.model = dissect_training(training, self.ranks)
        model = self.model
        self.max_staleness = check_policy(self.policy, model.anatomy, model.parts, model.num_bytes, max_staleness)
        self.drift = Drift(model.part_of, self.ranks)
        self.ledger = Ledger(self._new_id())
        self._before: Path | None = None
        self._is_weighed = all(self._together(training.has_state))
        self._together(lambda: check_trees(self._trees(None)))
        self._together(lambda: self.folder.lock() if self.ranks.is_first else None)

    def start(self, step: int) -> bool:
        """Take up the record of saves at the step that training resumes from; 0 begins anew.

        Returns whether there was one. Without it, or where the model is trained otherwise than before, the next save
        is a complete base. Partial checkpoints of later steps are from an attempt that is given up now: they move
        aside. Raises TargetError if training begins anew where another run has saved.
        """
        found = self._together(lambda: self._find(step) if self.ranks.is_first else None)[0]
        if found is None:
            return False
        ledger, self._before, lost = Ledger.from_json(found[0], found[1]), Path(found[1]), found[2]
        self.ledger = ledger.resumed(self._new_id(), step).without(lost)
        restore_state(self.policy, ledger.policy_state)
        # a part is now what its newest save held
        self.drift.remember(self.training.masters(), self.ledger.held_by)
        return True

    def has_state(self) -> bool:
        """Whether the optimizer has made a step, on all ranks, so that there are moments to save.

        Raises UnsupportedCheckpoint, on every rank, if they can't be saved; so it is worth asking after the first step.
        """
        return all(self._together(self._has_state))

    def save(
        self, step: int, write_state: Callable[[Path], None] | None = None, rng: Mapping[str, Any] | None = None
    ) -> SaveReport | None:
        """Save what the policy chooses.

        ``write_state`` is called on rank 0 to write ``trainer_state.json``; ``rng`` are the random number states to
        save if not those of now (see `rng_tree`). Returns None, with a warning, while the optimizer has not made a
        step. Raises SaveFailed for a save given up and UnsupportedCheckpoint for states that can't be saved, the same
        on every rank.
        """
        began = time.monotonic()
        if any(self.ranks.gather(self.training.look_again())):
            self._begin_anew()
        if not self.has_state():
            logger.warning("step %d: nothing was saved, the optimizer has not made a step yet", step)
            return None
        if not self._is_weighed:
            self.model, self._is_weighed = weigh(self.model, self.training, self.ranks), True
        masters = list(self.training.masters())
        drift = self.drift.measure(masters)
        policy_state = state_of(self.policy)
        chosen = self._together(lambda: self._choose(step, drift) if self.ranks.is_first else None)[0]
        assert chosen is not None
        save = SaveId(self.ranks.from_first(uuid.uuid4().hex), step)
        folder = self.folder.at(step)
        ledger = self.ledger.after(step, chosen, self.model.parts, state_of(self.policy))
        try:
            self._together(lambda: self.folder.begin(step) if self.ranks.is_first else None)
            facts = self._together(lambda: self._write(folder, save, chosen, rng))
            flat = [fact for kind in zip(*facts, strict=True) for fact in kind if fact is not None]
            self._together(
                lambda: self._publish(folder, save, chosen, flat, ledger, write_state) if self.ranks.is_first else None
            )
        except StorageError as error:
            restore_state(self.policy, policy_state)
            if self.ranks.is_first:
                shutil.rmtree(folder, ignore_errors=True)
                append(self.folder.path, {"step": step, "failed": str(error)})
            raise SaveFailed(error.problems) from error
        self.ledger, self._before = ledger, folder
        self.drift.remember(masters, chosen)
        report = SaveReport(
            step=step,
            parts=chosen,
            num_bytes=sum(fact.num_bytes for fact in flat),
            stall_s=time.monotonic() - began,
            drift=drift,
            steps_behind=ledger.steps_behind(),
            path=folder,
        )
        if self.ranks.is_first:
            append(self.folder.path, report.to_json())
            self._retire()
        return report

    def close(self) -> None:
        """Let another run save here."""
        self.folder.unlock()

    def _new_id(self) -> str:
        return self.ranks.from_first(uuid.uuid4().hex[:12])

    def _begin_anew(self) -> None:
        """Go on with another set of trained params, of which no earlier save knows."""
        logger.warning("other params are trained than before; the next save is complete")
        self.model = dissect_training(self.training, self.ranks)
        self.drift = Drift(self.model.part_of, self.ranks)
        self.ledger = Ledger(self._new_id())

    def _has_state(self) -> bool:
        """Whether this rank has moments to save. Raises UnsupportedCheckpoint if they can't be, or will never be."""
        has_state = self.training.has_state()
        if not has_state and self.training.has_stepped():
            fix = "use AdamW or another optimizer with moments"
            raise UnsupportedCheckpoint.at("the optimizer", "it has made a step and keeps no moments", fix)
        return has_state

    def _choose(self, step: int, drift: Mapping[str, float]) -> dict[str, str]:
        if not self.ledger.held_by:
            return dict.fromkeys(self.model.parts, "complete base")
        situation = Situation(
            step=step,
            save=self.ledger.saves,
            anatomy=self.model.anatomy,
            parts=self.model.parts,
            num_bytes=self.model.num_bytes,
            last=self.ledger.last,
            drift=drift if self.policy.needs_drift else None,
        )
        choice = choose(self.policy, situation, self.max_staleness)
        for problem in choice.problems:
            logger.warning("%s", problem)
        return dict(choice.parts)

    def _trees(self, rng: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the object trees of all stock files that this rank would write."""
        path = "rng_state.pth" if self.ranks.world_size == 1 else f"rng_state_{self.ranks.rank}.pth"
        trees = {**self.training.trees(), path: rng_tree() if rng is None else rng}
        if self.ranks.is_first and self.scheduler is not None:
            trees[SCHEDULER] = self.scheduler.state_dict()
        return trees

    def _write(
        self, folder: Path, save: SaveId, chosen: Iterable[str], rng: Mapping[str, Any] | None
    ) -> tuple[BundleFact, BundleFact | None]:
        params = [name for part in chosen for name in self.model.params_of[part]]
        bundle = write_rank(folder, save, self.training, params, self._trees(rng), self.ranks)
        return bundle, write_frozen(folder, self.training, self._before)

    def _publish(
        self,
        folder: Path,
        save: SaveId,
        chosen: Mapping[str, str],
        facts: Sequence[BundleFact],
        ledger: Ledger,
        write_state: Callable[[Path], None] | None,
    ) -> None:
        """Write what rank 0 writes, the manifest last."""
        self.carried.put(folder)
        if write_state is None:
            (folder / TRAINER_STATE).write_text(json.dumps({"global_step": save.step}))
        else:
            write_state(folder)
        policy = {"name": self.policy.name, **self.policy.settings(), "max_staleness": self.max_staleness}
        publish(folder, save, self.training, self.model, policy, chosen, facts, ledger, self.ranks.world_size)

    def _find(self, step: int) -> tuple[Any, str, set[str]] | None:
        """Find the record of saves at a step; also say where, and which parts' newest saves are lost."""
        if swept := self.folder.sweep():
            logger.warning("removed %s: these saves did not finish", ", ".join(swept))
        if step == 0 and (there := self.folder.complete()):
            what = f"another run has saved here, up to step {max(there)}"
            fix = "resume from it (llmtailor merge --run), or give this run another output_dir, or remove the folder"
            raise TargetError.at(self.folder.path, what, fix)
        if moved := self.folder.abandon_after(step):
            logger.warning("resuming at step %d: %s are given up, and have moved aside", step, ", ".join(moved))
        path = self.folder.at(step)
        if not is_partial(path):
            return None
        manifest = read_manifest(path, path.name)
        if dict(manifest.params) != dict(self.training.params) or dict(manifest.tied) != dict(self.training.tied):
            logger.warning("%s is of another model or of other trained params; the next save is complete", path.name)
            return None
        return manifest.ledger, str(path), lost_parts(Ledger.from_json(manifest.ledger, path.name), self._records())

    def _records(self) -> list[SaveRecord]:
        """Return what the folder's partial checkpoints say that they hold; one that is damaged gives nothing."""
        records = []
        for manifest in self.folder.manifests():
            with suppress(SourceError):
                records.append(SaveRecord.from_json(manifest.ledger, ""))
        return records

    def _retire(self) -> None:
        if self.keep_composable is None:
            return
        for step in deletable(self._records(), self.ledger, self.keep_composable):
            self.folder.remove(step)
        self.folder.remove_abandoned()

    def _together(self, call: Callable[[], Any]) -> list[Any]:
        """Make a call on every rank and return all results. What one refuses is raised on all.

        OSError becomes StorageError. What is no refusal, but a bug, is raised as it is where it happened.
        """
        bug: Exception | None = None
        result, refusal = None, None
        try:
            result = call()
        except TailorError as error:
            refusal = (type(error), error.problems)
        except OSError as error:
            where = str(error.filename or self.folder.path)
            what = f"rank {self.ranks.rank} can't write: {error.strerror}"
            refusal = (StorageError, (Problem(where, what, "free some space, or check the disk"),))
        except Exception as error:
            bug = error
            what = f"rank {self.ranks.rank} raised {error!r}"
            refusal = (TailorError, (Problem("llmtailor.saving", what, "see the first error of that rank"),))
        told = self.ranks.gather((result, refusal))
        if bug is not None:
            raise bug
        refusals = [refusal for _, refusal in told if refusal is not None]
        if refusals:
            # a disk that is full excuses no bug and no refusal
            kind = min((kind for kind, _ in refusals), key=lambda kind: kind.exit_code)
            raise kind(dict.fromkeys(problem for _, problems in refusals for problem in problems))
        return [result for result, _ in told]
