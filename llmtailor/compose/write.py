"""Writes a planned composite: resume or start over -> execute -> read back -> rename."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import datetime, timezone
from itertools import chain, count
from pathlib import Path
from typing import Any

from llmtailor import __version__
from llmtailor.compose.manifest import make_manifest, stated_checksums
from llmtailor.compose.plan import Composition, Options, plan_merge
from llmtailor.compose.report import Report, card
from llmtailor.compose.share import gather, leading, read_together, write_share, write_together
from llmtailor.engine.copy import Context, FileResult, Moved, execute
from llmtailor.engine.journal import Identity, Mark, Unfinished, identify, is_another, why_not
from llmtailor.engine.pool import Stop, stoppable
from llmtailor.engine.recheck import SourceFile, read_again
from llmtailor.engine.space import check_space, occupied_bytes
from llmtailor.engine.staging import Staging, peek, staging_folder
from llmtailor.engine.upload import Upload, clear, is_unfinished
from llmtailor.errors import (
    Interrupted,
    PathIn,
    Problem,
    SourceError,
    StorageError,
    TargetError,
    Unanswered,
    VerificationError,
)
from llmtailor.findings import ERROR, Finding
from llmtailor.formats.manifest import read_merge
from llmtailor.formats.registry import display_name
from llmtailor.loaders.files import CARD, MANIFEST
from llmtailor.loaders.loader import CLIENTS
from llmtailor.ranks.group import RankGroup
from llmtailor.recipe import Recipe
from llmtailor.storage.checksums import crc32
from llmtailor.storage.listing import FileFact
from llmtailor.storage.local import write_durably
from llmtailor.storage.stand_in import stand_in_of, stand_ins, with_urls
from llmtailor.timing import Stopwatch
from llmtailor.verify.verify import verify_checkpoint

logger = logging.getLogger(__name__)


def merge(recipe: Recipe | Path, out: Path | None = None, options: Options | None = None) -> Report:
    """Plan a merge, write it, and return the report of what was written. See `plan_merge` and `write`.

    Args:
        recipe: a parsed recipe, or the path of a YAML file.
        out: the folder to write. It must not exist, unless ``options.replace`` or ``options.reuse`` is set.
        options: see `Options`.
    """
    composition = plan_merge(recipe, out, options)
    write(composition)
    return composition.report


def check_room(composition: Composition) -> None:
    """Raise StorageError if the output's file system lacks space for it, less what an unfinished merge occupies."""
    check_space(composition.out, composition.report.needed_bytes - occupied_bytes(composition.out))


def bytes_to_move(composition: Composition) -> int:
    """Return how many bytes `write` reports to ``on_progress``."""
    files = composition.plan.summary.read if composition.options.checksum else ()
    sources = sum(composition.indexes[number].files[path].num_bytes for number, path in files)
    uploaded = composition.plan.num_bytes if stand_in_of(composition.out) else 0
    return composition.plan.num_bytes + sources + uploaded


def write(
    composition: Composition,
    on_progress: Callable[[int], None] = lambda num_bytes: None,
    notify: Callable[[str], None] = lambda text: None,
    group: RankGroup | None = None,
) -> Moved:
    """Write a planned composite, verify it, and publish it by one rename; return how its bytes got there.

    The output stays absent, or the old one, until the new one is complete. After StorageError, Unanswered and
    Interrupted, make the same call again to resume.

    Args:
        composition: from `plan_merge`.
        on_progress: called with a number of bytes moved, from several threads.
        notify: called with sentences for the user.
        group: the ranks that share the merge, each of which calls this function. Rank 0 publishes; what it returns
            counts all ranks, and what another one returns its own share.

    Raises:
        TargetError: another process writes the output, or it holds an unfinished merge of another recipe.
        StorageError: there is not enough space, or the operating system refused to read or write.
        SourceError: a source is damaged, or changed in the meantime.
        VerificationError: the output does not read back as planned.
        Unanswered: a rank died or hangs.
        UsageError: the ranks have planned different merges.
        Interrupted: Ctrl-C or SIGTERM.
    """
    identity, watch = identify_merge(composition), Stopwatch()
    if group is not None and not group.is_first:
        with stoppable() as stop:
            return write_share(composition, identity, group, stop)
    if is_unfinished(composition.out):
        clear(composition.out)
    lock = group.lock if group is not None else None
    with stoppable() as stop, Staging(composition.out, composition.replaces, lock) as staging, leading(group, stop):
        try:
            if group is not None:
                gather(group, composition, identity)
            check_room(composition)
            kept, before = resume(composition, identity, staging, notify)
            facts = [index.files for index in composition.indexes]
            told = composition.options
            with _uploading(composition, on_progress, stop) as upload:
                context = Context(
                    facts,
                    kept,
                    on_progress,
                    # what is uploaded leaves nothing to resume from
                    staging.journal.add if upload is None else lambda path, mark: None,
                    digest=told.checksum,
                    stop=stop,
                    clone=told.clone,
                    direct=upload is None,
                    upload=upload,
                )
                logger.info("writing in %s", staging.path)
                if group is None:
                    results = execute(composition.plan, staging.path, context)
                else:
                    results = write_together(group, composition, staging.path, context, on_progress)
                size = f"{composition.plan.num_bytes:,}"
                logger.info("wrote %d files, %s bytes, in %s", len(results), size, watch.lap())
                digests = _check_sources(composition, results, before, on_progress, stop, group)
                logger.info("checked that the sources are unchanged, in %s", watch.lap())
                readme = _card(composition).encode()
                content = make_manifest(composition, results, digests, readme, identity.digest(), now())
                for name, data in ((MANIFEST, json.dumps(content, indent=2).encode() + b"\n"), (CARD, readme)):
                    write_durably(staging.path / name, data)
                    if upload is not None:
                        upload.take(staging.path / name, name, crc32(data))
                if upload is not None:
                    upload.show()
                check_written(composition, staging.path if upload is None else composition.out)
                logger.info("verified what was written in %s", watch.lap())
                stop.check()
                if upload is None:
                    staging.publish()
            logger.info("published %s in %s", display_name(composition.out), watch.lap())
        except (Interrupted, StorageError, Unanswered) as error:
            raise with_what_is_kept(error, composition, staging) from error
    if staging.folder.exists():
        notify(f"{staging.folder} could not be removed; its content is no longer needed")
    return sum((result.moved for result in results), Moved())


def _card(composition: Composition) -> str:
    client = CLIENTS[composition.client]
    return card(composition.report, __version__, composition.family, composition.target.stage, client)


def _uploading(
    composition: Composition, on_progress: Callable[[int], None], stop: Stop
) -> AbstractContextManager[Upload | None]:
    """Return the upload of an output, a context manager around making it; None for a folder of this machine."""
    if stand_in_of(composition.out) is None:
        return nullcontext()
    num_bytes = {file.path: file.num_bytes for file in composition.plan.files} | {CARD: 0, MANIFEST: 0}
    return Upload(composition.out, num_bytes, on_progress, stop)


def _check_sources(
    composition: Composition,
    results: Sequence[FileResult],
    before: Mapping[str, FileFact],
    on_progress: Callable[[int], None],
    stop: Stop,
    group: RankGroup | None,
) -> dict[SourceFile, str]:
    """Check that no source has changed since ``before``; return the digests of the files read, if requested.

    A file whose metadata alone differ is compared by content: a hard-link backup, or a mount with new inode numbers,
    must not discard hours of work. With ``--checksum`` every file read is compared, also with the checksums stated in
    it or in a manifest next to it.
    """
    changed, doubtful = [], set()
    for remote in stand_ins.values():
        remote.list()
    for number, index in enumerate(composition.indexes):
        for path, fact in index.files.items():
            try:
                now = FileFact.of((index.root / path).stat())
            except OSError:
                now = None
            if now is None or not now.is_like(fact):
                changed.append(
                    Problem(PathIn(index.name, path), "the file changed while it was read", "run the merge again")
                )
                continue
            known = before.get(f"{composition.plan.sources[number]}/{path}", now)
            if now != known and not stand_in_of(index.root):
                doubtful.add((number, path))
    if changed:
        raise SourceError(changed)
    wanted = composition.plan.summary.read
    if composition.options.checksum:
        if group is not None:
            return read_together(group, composition, results, on_progress, stop)
        return read_again(composition.plan, results, wanted, on_progress, stop, stated_checksums(composition, wanted))
    read_again(composition.plan, results, doubtful.intersection(wanted), lambda num_bytes: None, stop)
    return {}


def _kind(finding: Finding) -> tuple[object, ...]:
    """Return what the same finding of the same file has in common in a source and in the composite."""
    return finding.code, finding.severity, finding.path, finding.params


def check_written(composition: Composition, staging: Path) -> None:
    """Verify the output like any other checkpoint, and compare it with the plan.

    Findings that the same files of the sources have were reported as notices before anything was written.
    """
    wanted, out = composition.indexes[composition.base], display_name(composition.out)
    known = {_kind(notice) for notice in composition.report.notices if isinstance(notice, Finding)}
    try:
        verdict = verify_checkpoint(staging, name=out)
    except SourceError as error:
        raise VerificationError(error.problems) from error
    if errors := [finding for finding in verdict.of_severity(ERROR) if _kind(finding) not in known]:
        raise VerificationError(errors)
    written = verdict.index
    assert written is not None, "a checkpoint without an index has errors"
    wanted_groups = composition.target.sub_groups
    pairs = zip(written.groups, composition.target.groups, strict=False)
    if (
        written.params != wanted.params
        or written.world_size != composition.target.world_size
        or [(one.params, one.step) for one in written.sub_groups] != [(one.params, one.step) for one in wanted_groups]
        or len(written.groups) != len(composition.target.groups)
        or any(not _has_all(have.hyper, want.hyper) for have, want in pairs)
        or any(written.files[file.path].num_bytes != file.num_bytes for file in composition.plan.files)
    ):
        raise VerificationError.at(
            out, "the output does not read back as planned", "this is a bug in llmtailor: please report it"
        )


def identify_merge(composition: Composition) -> Identity:
    """Return the identity of a merge, for its journal."""
    recipe, options = composition.recipe, composition.options
    asked = (recipe.base, recipe.rules, recipe.dtype, recipe.tokenizer, recipe.chat_template)
    return identify(
        composition.plan,
        [index.files for index in composition.indexes],
        tool_version=__version__,
        recipe=recipe.name,
        request=with_urls(repr((asked, replace(options, replace=False, restart=False, checksum=False, clone="auto")))),
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
    error: Interrupted | StorageError | Unanswered, composition: Composition, staging: Staging
) -> Interrupted | StorageError | Unanswered:
    """Return the error with the bytes that a resume will keep."""
    if stand_in_of(composition.out) or not (kept := staging.kept_bytes):
        return error
    then = f"it resumes with {kept:,} of {composition.plan.num_bytes:,} bytes kept in {staging.folder}"
    if isinstance(error, StorageError):  # the others say already that the command is to be run again
        then = f"then rerun the same command: {then}"
    return type(error)(replace(problem, fix=f"{problem.fix}; {then}") for problem in error.problems)


def _has_all(written: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Return whether a param group has all hyperparameters; a format may add those that its loader asks for."""
    return all(key in written and written[key] == value for key, value in wanted.items())
