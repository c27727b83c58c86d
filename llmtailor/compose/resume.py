"""What identifies a merge: whether an unfinished or a complete output is of the same one, and under which name to
write if another merge has it."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime, timezone
from itertools import chain, count
from pathlib import Path

from llmtailor._version import __version__
from llmtailor.compose.plan import MergePlan
from llmtailor.copying.journal import Identity, Mark, Unfinished, identify, is_another, why_not
from llmtailor.copying.staging import Staging, peek, staging_folder
from llmtailor.errors import Interrupted, SourceError, StorageError, TargetError, Unanswered, UsageError
from llmtailor.formats.composite import read_merge
from llmtailor.formats.registry import BESIDE, display_name
from llmtailor.ranks.team import Ranks, check_same
from llmtailor.storage.local import FileFact

logger = logging.getLogger(__name__)
_COMMAND = "start all ranks with the same command in the same environment"
_WAIT = "wait until the sources are complete on all nodes, then rerun the command"
_MUST_BE_SAME = {
    "version of llmtailor": (_COMMAND, UsageError),
    "recipe or options": (_COMMAND, UsageError),
    "sizes or times of the sources' files": (_WAIT, SourceError),
    "content of the sources": (_COMMAND, SourceError),
}


def identify_merge(composition: MergePlan) -> Identity:
    """Return the identity of a merge, for its journal."""
    recipe, options = composition.recipe, composition.options
    asked = (recipe.base, recipe.rules, recipe.dtype, recipe.tokenizer, recipe.chat_template)
    return identify(
        composition.plan,
        [index.files for index in composition.indexes],
        tool_version=__version__,
        recipe=recipe.name,
        request=repr((asked, replace(options, replace=False, restart=False, checksum=False, clone="auto"))),
        begun=now(),
    )


def check_same_merge(composition: MergePlan, identity: Identity, ranks: Ranks) -> None:
    """Raise UsageError or SourceError on all ranks unless all have planned the same merge of the same sources."""
    if ranks.world_size == 1:
        return
    facts = sorted((path, fact.num_bytes, fact.mtime_ns) for path, fact in identity.sources.items())
    options = composition.options
    how = (options.restart, options.replace, options.checksum, options.clone, str(composition.out))
    own = {
        "version of llmtailor": identity.tool_version,
        "recipe or options": _digest((identity.request, how)),
        "sizes or times of the sources' files": _digest(facts),
        "content of the sources": identity.plan,
    }
    check_same(ranks.all_gather(own), _MUST_BE_SAME)


def _digest(content: object) -> str:
    return hashlib.sha256(repr(content).encode()).hexdigest()[:16]


def choose_output(composition: MergePlan) -> tuple[MergePlan, str | None]:
    """Return the merge under a free name, and what makes it unnecessary: its base, or an output of the same merge.

    If something else has the name of the output, a number is added to it.
    """
    if composition.is_copy:
        return composition, composition.report.base
    if composition.options.replace:
        return composition, None
    first = composition.out
    plain = first.with_name(first.name.removesuffix(BESIDE))  # what has this name may be the output of the same merge
    numbered = (first.with_name(f"{first.name}-{number}") for number in count(2))
    for out in chain([plain] if plain.exists() else [], [first], numbered):
        named = with_output(composition, out)
        if not out.exists():
            return named, None
        if is_written(named):
            return named, named.report.out
    raise AssertionError("numbers never run out")


def with_output(composition: MergePlan, out: Path) -> MergePlan:
    return replace(composition, out=out, report=replace(composition.report, out=display_name(out)))


def is_written(composition: MergePlan) -> bool:
    """Whether the output exists, written by the same merge of the same sources."""
    return read_merge(composition.out) == identify_merge(composition).digest()


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def preview(composition: MergePlan) -> str:
    """Return a sentence on what a merge will do with an unfinished one in its output; empty if there is none.

    Raises TargetError if the merge will refuse.
    """
    unfinished = peek(composition.out)
    if unfinished is None or not unfinished.num_bytes:
        return ""
    return _judge(unfinished, identify_merge(composition), composition)[1]


def resume(
    composition: MergePlan, identity: Identity, staging: Staging, notify: Callable[[str], None]
) -> tuple[Mapping[str, tuple[Mark, ...]], Mapping[str, FileFact]]:
    """Resume the unfinished merge or start over; return the marks of its files, and the facts of its sources.

    Raises TargetError if the unfinished merge is of another recipe, and StorageError.
    """
    if unfinished := staging.unfinished:
        resumes, sentence = _judge(unfinished, identity, composition)
        if unfinished.num_bytes:
            notify(sentence)
        else:
            logger.info("an earlier merge into %s was interrupted before anything was durable", composition.out)
        if resumes:
            staging.resume()
            return unfinished.marks, unfinished.identity.sources
    staging.reset(identity)
    return {}, identity.sources


def _judge(unfinished: Unfinished, identity: Identity, composition: MergePlan) -> tuple[bool, str]:
    """Return whether to resume the unfinished merge, and a sentence about it."""
    there, options = unfinished.identity, composition.options
    share = f"{unfinished.num_bytes:,} of {there.num_bytes:,} bytes"
    reason = "--restart was given" if options.restart else why_not(there, identity)
    if not reason:
        return True, f"resuming the merge begun at {there.begun}: {share} are written and will be checked"
    what = f"the output holds an unfinished merge ({there.recipe}, begun at {there.begun}, {share})"
    # with --force even a complete output may go
    if is_another(there, identity) and unfinished.num_bytes and not (options.restart or options.replace):
        folder = staging_folder(composition.out)
        fix = f"rerun that command to resume it; to discard it, remove {folder}, or give merge or convert --restart"
        raise TargetError.at(composition.out, f"{what}, but {reason}", fix)
    return False, f"{what}; it is discarded, because {reason}"


def with_kept_bytes(
    error: Interrupted | StorageError | Unanswered, composition: MergePlan, staging: Staging
) -> Interrupted | StorageError | Unanswered:
    """Return the error with the bytes that a resume will keep."""
    if not (kept_bytes := staging.kept_bytes):
        return error
    then = f"it resumes with {kept_bytes:,} of {composition.plan.num_bytes:,} bytes kept in {staging.folder}"
    if isinstance(error, StorageError):  # the other errors already say so
        then = f"then rerun the same command: {then}"
    return type(error)(replace(problem, fix=f"{problem.fix}; {then}") for problem in error.problems)
