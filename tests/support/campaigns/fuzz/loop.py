"""Mutates and parses, and judges what comes of it."""

from __future__ import annotations

import random
import re
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from campaigns.fuzz.parsers import PARSERS, Parser
from helpers.composing import convert
from llmtailor.checkpoint.lineage import Ledger
from llmtailor.errors import TailorError
from llmtailor.formats.registry import find_structure, index_checkpoint
from synthetic import SHAPES, lay_out, make_checkpoint
from thin.scene import save_partial

SECONDS = 20
"""An input that takes longer is a finding. None should take more than a few seconds."""
KEPT = 400
"""Inputs that are kept for further mutation, beside the first ones."""


@dataclass
class Tally:
    """What came of the inputs."""

    accepted: int = 0
    refused: int = 0
    outcomes: int = 0
    """Different refusals."""
    findings: list[tuple[bytes, str]] | None = None

    def __str__(self) -> str:
        return f"{self.accepted + self.refused} inputs, {self.accepted} accepted, {self.outcomes} different refusals"


def make_sound(folder: Path) -> dict[str, Path]:
    """Make small checkpoints of every form; return them by form."""
    shape = replace(SHAPES["tiny"], vocab_size=5, hidden_size=4, intermediate_size=6, num_layers=2, head_dim=2)
    shape = replace(shape, num_heads=2, num_kv_heads=1)
    sound = {form: folder / form / "checkpoint-100" for form in ("zero3", "sharded", "zero2", "plain")}
    make_checkpoint(sound["zero3"], shape, lay_out(shape, 2), 100)
    make_checkpoint(sound["sharded"], shape, lay_out(shape, 2), 100, shard_bytes=200)
    for form, stage in (("zero2", 2), ("plain", 0)):
        convert(sound["zero3"], sound[form], stage=stage)
    for form in ("universal", "dcp", "fsdp"):
        sound[form] = convert(sound["zero3"], folder / form / "checkpoint-100", to=form, world_size=2)
    for form, full in (("partial", "zero3"), ("partial2", "zero2"), ("partial0", "plain")):
        index = index_checkpoint(sound[full])
        save_partial(folder / form, sound[full], find_structure(index).parts, Ledger("fuzz"))
        (sound[form],) = (folder / form / "partial").iterdir()
    return sound


def fuzz(name: str, sound: dict[str, Path], rng: random.Random, more: Callable[[int], bool]) -> Tally:
    """Mutate and parse as long as ``more``, asked with the number of inputs so far, says so."""
    parser, tally = PARSERS[name], Tally(findings=[])
    seeds = parser.seeds(sound)
    kept: list[bytes] = []
    known: set[tuple[Any, ...]] = set()
    count = 0
    while more(count):
        data = seeds[count] if count < len(seeds) else _next(parser, seeds, kept, rng)
        outcome, finding = try_input(parser, data, sound)
        count += 1
        assert tally.findings is not None
        if finding:
            tally.findings.append((data, finding))
        elif outcome is None:
            tally.accepted += 1
        else:
            tally.refused += 1
        if outcome not in known:
            known.add(outcome)
            kept = [*kept[-KEPT:], data]
    tally.outcomes = len(known - {None})
    return tally


def _next(parser: Parser, seeds: list[bytes], kept: list[bytes], rng: random.Random) -> bytes:
    pool = kept if kept and rng.random() < 0.5 else seeds
    return parser.mutate(rng.choice(pool), rng.choice(seeds), rng)


def try_input(parser: Parser, data: bytes, sound: dict[str, Path]) -> tuple[tuple[Any, ...] | None, str]:
    """Parse one input. Return which refusal it ended in (None: it was accepted), and what is wrong with that, or ""."""
    with tempfile.TemporaryDirectory(prefix="llmtailor-fuzz-") as folder:
        try:
            with _limit(SECONDS):
                parser.parse(data, Path(folder), sound)
            return None, ""
        except TailorError as error:
            bare = [problem for problem in error.problems if not (problem.where and problem.what and problem.fix)]
            lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__)[-2:]]
            texts = [re.sub(r"[0-9]+|'.*?'|\".*?\"|/\S+", "*", problem.what[:200]) for problem in error.problems[:3]]
            return (type(error).__name__, *lines, *texts), f"no mend: {bare[0]}" if bare else ""
        except Exception:  # whatever it is, it is what is looked for
            return ("crash",), traceback.format_exc()


class TooSlow(Exception):
    pass


@contextmanager
def _limit(seconds: float) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TooSlow(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
