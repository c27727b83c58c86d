"""Goes on from the newest state of a run, on all ranks, when a job is started again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import wraps
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtailor.ranks.board import await_messages
from llmtailor.ranks.codec import as_error, from_json, to_json
from llmtailor.runs.newest import compose_newest, continues
from llmtailor.saving.ranks import Ranks

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

    def compose() -> str | None:
        newest = compose_newest(run, ranks.world_size, others)
        if newest is None:
            return None
        how = "composed" if newest.is_new else "it was there already"
        logger.warning("restart: going on at step %d from %s (%s)", newest.step, newest.path, how)
        return str(newest.path)

    found = _first_of_all(ranks, compose)
    return Path(found) if found is not None else None


def resume_by_itself(trainer: Trainer, also: Sequence[str | Path] = ()) -> None:
    """Make ``trainer.train()`` go on from the newest state of its ``output_dir``.

    A callback comes too late for that: when `on_train_begin` runs, the Trainer has decided where the data begins. So
    this replaces the method on this one Trainer. A checkpoint that the caller names stays, unless the newest attempt
    goes back to it, over however many restarts: a restarted job names the same one again.
    """
    train: Callable[..., Any] = trainer.train

    @wraps(train)
    def resuming(resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        output_dir, given = Path(trainer.args.output_dir), resume_from_checkpoint
        named = None if given is None or isinstance(given, bool) else Path(given)
        is_open = named is None or Ranks.here().on_first(lambda: continues(output_dir, named))
        if is_open and kwargs.get("trial") is None and (newest := newest_checkpoint(output_dir, also)):
            given = str(newest)
        return train(given, *args, **kwargs)

    trainer.train = resuming


def _first_of_all(ranks: Ranks, call: Callable[[], str | None]) -> str | None:
    """Make a call on rank 0, which may take longer than a collective may, and return its result on every rank."""
    board, key = ranks.board(), f"restart-{next(_numbers)}"
    if ranks.is_first:
        try:
            board.post(key, {"result": call()})
        except Exception as error:
            refusal = as_error(error, "newest_checkpoint")
            board.post(key, {"error": to_json(refusal)})
            raise refusal from error
    (message,) = await_messages(board, [key], lambda: None)
    if "error" in message:
        raise from_json(message["error"])
    return message["result"]  # type: ignore[no-any-return]
