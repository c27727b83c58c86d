"""Decides whether a merge resumes an interrupted one, and reports it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime, timezone
from itertools import chain, count

from llmtailor import __version__
from llmtailor.compose.plan import Composition
from llmtailor.engine.journal import Identity, Mark, Unfinished, identify, is_another, why_not
from llmtailor.engine.staging import Staging, peek, staging_folder
from llmtailor.errors import Interrupted, StorageError, TargetError
from llmtailor.formats.manifest import read_merge
from llmtailor.formats.registry import display_name
from llmtailor.storage.local import FileFact

logger = logging.getLogger(__name__)


def identify_merge(composition: Composition) -> Identity:
    """Return the identity of a merge, for its journal."""
    recipe, options = composition.recipe, composition.options
    asked = (recipe.base, recipe.rules, recipe.dtype, recipe.tokenizer, recipe.chat_template)
    return identify(
        composition.plan,
        [index.files for index in composition.indexes],
        tool_version=__version__,
        recipe=recipe.name,
        request=(asked, replace(options, replace=False, restart=False, checksum=False)),
        begun=now(),
    )


def settle_output(composition: Composition) -> tuple[Composition, str | None]:
    """Return the merge under a free name, and what makes it unnecessary: its base, or an output of the same merge.

    If something else has the name of the output, a number is added to it.
    """
    if composition.is_copy:
        return composition, composition.report.base
    if composition.options.replace:
        return composition, None
    first = composition.out
    numbered = (first.with_name(f"{first.name}-{number}") for number in count(2))
    for out in chain([first], numbered):
        named = replace(composition, out=out, report=replace(composition.report, out=display_name(out)))
        if not out.exists():
            return named, None
        if is_written(named):
            return named, named.report.out
    raise AssertionError("numbers never run out")


def is_written(composition: Composition) -> bool:
    """Whether the output exists, written by the same merge of the same sources."""
    return read_merge(composition.out) == identify_merge(composition).digest()


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def preview(composition: Composition) -> str:
    """Return a sentence on what a merge will do with an unfinished one in its output; empty if there is none.

    Raises TargetError if the merge will refuse.
    """
    unfinished = peek(composition.out)
    if unfinished is None or not unfinished.num_bytes:
        return ""
    return _judge(unfinished, identify_merge(composition), composition)[1]


def resume(
    composition: Composition, identity: Identity, staging: Staging, notify: Callable[[str], None]
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


def _judge(unfinished: Unfinished, identity: Identity, composition: Composition) -> tuple[bool, str]:
    """Return whether to resume the unfinished merge, and a sentence about it."""
    there, options = unfinished.identity, composition.options
    share = f"{unfinished.num_bytes:,} of {there.num_bytes:,} bytes"
    reason = "--restart was given" if options.restart else why_not(there, identity)
    if not reason:
        return True, f"resuming the merge begun at {there.begun}: {share} are written and will be checked"
    what = f"the output holds an unfinished merge ({there.recipe}, begun at {there.begun}, {share})"
    # whoever allows replacing a complete output does not want to keep an incomplete one
    if is_another(there, identity) and unfinished.num_bytes and not (options.restart or options.replace):
        fix = (
            f"rerun that merge to resume it; use --restart, or remove {staging_folder(composition.out)}, to discard it"
        )
        raise TargetError.at(composition.out, f"{what}, but {reason}", fix)
    return False, f"{what}; it is discarded, because {reason}"


def with_what_is_kept(
    error: Interrupted | StorageError, composition: Composition, staging: Staging
) -> Interrupted | StorageError:
    """Return the error with the bytes that a resume will keep."""
    if not (kept := staging.kept_bytes):
        return error
    there = f"{kept:,} of {composition.plan.num_bytes:,} bytes kept in {staging.folder}"
    return type(error)(
        replace(problem, fix=f"{problem.fix}; rerun the same command to resume with {there}")
        for problem in error.problems
    )
