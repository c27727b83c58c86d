"""Decides whether a merge goes on with what an interrupted one has left, and says so."""

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
    """Identify a merge, for its journal."""
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
    """Return a merge under a name that is free, and what makes it needless: its base, or the output of the same merge.

    Where something else has the name of the output, a number is added to it.
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
    raise AssertionError("there is no last number")


def is_written(composition: Composition) -> bool:
    """Whether the output is there already, written by the same merge of the same sources."""
    return read_merge(composition.out) == identify_merge(composition).digest()


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def preview(composition: Composition) -> str:
    """Say what a merge will do with what an earlier one into the same output has left; empty if that is nothing.

    Raises TargetError if it will refuse.
    """
    unfinished = peek(composition.out)
    if unfinished is None or not unfinished.num_bytes:
        return ""
    return _judge(unfinished, identify_merge(composition), composition)[1]


def resume(
    composition: Composition, identity: Identity, staging: Staging, notify: Callable[[str], None]
) -> tuple[Mapping[str, tuple[Mark, ...]], Mapping[str, FileFact]]:
    """Go on with what is there, or begin anew; return how far which files are, and what the sources were like then.

    Raises TargetError if what is there is of another recipe, and StorageError.
    """
    if unfinished := staging.unfinished:
        goes_on, sentence = _judge(unfinished, identity, composition)
        if unfinished.num_bytes:
            notify(sentence)
        else:
            logger.info("an earlier merge into %s was interrupted before anything was durable", composition.out)
        if goes_on:
            staging.resume()
            return unfinished.marks, unfinished.identity.sources
    staging.reset(identity)
    return {}, identity.sources


def _judge(unfinished: Unfinished, identity: Identity, composition: Composition) -> tuple[bool, str]:
    """Return whether to go on with what is there, and a sentence about it."""
    there, options = unfinished.identity, composition.options
    share = f"{unfinished.num_bytes:,} of {there.num_bytes:,} bytes"
    reason = "--restart was given" if options.restart else why_not(there, identity)
    if not reason:
        return True, f"going on with the merge begun at {there.begun}: {share} are there, and are checked"
    what = f"an unfinished merge is there ({there.recipe}, begun at {there.begun}, {share})"
    # nobody who lets a complete output be replaced wants to keep an incomplete one
    if is_another(there, identity) and unfinished.num_bytes and not (options.restart or options.replace):
        fix = f"run that one again to go on with it; say --restart, or remove {staging_folder(composition.out)}, if not"
        raise TargetError.at(composition.out, f"{what}, but {reason}", fix)
    return False, f"{what}; it is thrown away, because {reason}"


def with_what_is_kept(
    error: Interrupted | StorageError, composition: Composition, staging: Staging
) -> Interrupted | StorageError:
    """Add to an error what is there to go on with."""
    if not (kept := staging.kept_bytes):
        return error
    there = f"{kept:,} of {composition.plan.num_bytes:,} bytes that are kept in {staging.folder}"
    return type(error)(
        replace(problem, fix=f"{problem.fix}; the same command goes on with the {there}") for problem in error.problems
    )
