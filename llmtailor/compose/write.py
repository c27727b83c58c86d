"""Writes a planned composite, by one process or several ranks, in stages: begin or resume, write the files, compare
the sources with their records and with what they were, add the manifest, read the output back, publish it.

Each rank writes whole files, in the shares that `deal` gives, with a journal of its own. Rank 0 does the rest.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmtailor._version import __version__
from llmtailor.balance import deal
from llmtailor.compose.manifest import make_manifest
from llmtailor.compose.plan import MergePlan, Options, plan_merge
from llmtailor.compose.readback import check_written, prove
from llmtailor.compose.recorded import check_sources, compare_with_records, recorded_checksums
from llmtailor.compose.report import Report, card
from llmtailor.compose.resume import check_same_merge, identify_merge, now, resume, with_kept_bytes
from llmtailor.copying.copy import Context, CopyStats, FileResult, execute
from llmtailor.copying.journal import Identity, Journal, Mark
from llmtailor.copying.moving import Upload, clear, is_unfinished
from llmtailor.copying.pool import Stop, stoppable
from llmtailor.copying.recheck import SourcePath
from llmtailor.copying.staging import OUT, Staging, check_space, occupied_bytes, rank_journal, staging_folder
from llmtailor.errors import Interrupted, StorageError, Unanswered, UsageError
from llmtailor.findings import ERROR
from llmtailor.formats.registry import display_name
from llmtailor.frameworks.files import CARD, MANIFEST
from llmtailor.frameworks.framework import FRAMEWORKS
from llmtailor.ranks.team import Ranks
from llmtailor.recipe import Recipe
from llmtailor.storage.checksums import Taken, crc32
from llmtailor.storage.local import FileFact, Lock, write_durably
from llmtailor.storage.remote import RemotePath
from llmtailor.timing import Stopwatch, unreported

logger = logging.getLogger(__name__)
LEAVING_S = 10.0
"""How long the ranks of an earlier merge may take to notice that it has ended"""


def merge(recipe: Recipe | str | Path, out: str | Path | None = None, options: Options | None = None) -> Report:
    """Plan a merge, write it, and return the report of what was written. See `plan_merge` and `write`.

    Args:
        recipe: a parsed recipe, or the path of a YAML file.
        out: the folder to write. It must not exist, unless ``options.replace`` or ``options.reuse`` is set.
        options: see `Options`.
    """
    composition = plan_merge(recipe, out, options)
    write(composition)
    return composition.report


def check_room(composition: MergePlan) -> None:
    """Raise StorageError if the output's file system lacks space for it, less what an unfinished merge occupies."""
    check_space(composition.out, composition.report.needed_bytes - occupied_bytes(composition.out))


def bytes_to_move(composition: MergePlan) -> int:
    """Return how many bytes `write` reports to ``on_progress``."""
    files = composition.plan.summary.read if composition.options.checksum else ()
    sources = sum(composition.indexes[number].files[path].num_bytes for number, path in files)
    uploaded = composition.plan.num_bytes if isinstance(composition.out, RemotePath) else 0
    return composition.plan.num_bytes + sources + uploaded


def write(
    composition: MergePlan,
    on_progress: Callable[[int], None] | None = None,
    notify: Callable[[str], None] | None = None,
    ranks: Ranks | None = None,
) -> CopyStats:
    """Write a planned composite, verify it, and publish it by one rename; return how its bytes got there.

    The output stays absent, or the old one, until the new one is complete. After StorageError, Unanswered and
    Interrupted, make the same call again to resume.

    Args:
        composition: from `plan_merge`.
        on_progress: called with a number of bytes moved, from several threads.
        notify: called with sentences for the user.
        ranks: the ranks that share the merge, each of which calls this function. Rank 0 publishes.

    Raises:
        TargetError: another process writes the output, or it holds an unfinished merge of another recipe.
        StorageError: there is not enough space, or the operating system refused to read or write.
        SourceError: a source is damaged, or changed in the meantime.
        VerificationError: the output does not read back as planned.
        Unanswered: a rank died or hangs.
        UsageError: the ranks have planned different merges, or share an output in an object store.
        Interrupted: Ctrl-C or SIGTERM.
    """
    ranks, on_progress, notify = ranks or Ranks(), on_progress or unreported, notify or unreported
    identity, watch = identify_merge(composition), Stopwatch()
    check_same_merge(composition, identity, ranks)
    if ranks.world_size > 1 and isinstance(composition.out, RemotePath):
        raise UsageError.at("--distributed", "an object store can't be written by several ranks", "name a folder")
    with stoppable() as stop, _begin(composition, identity, ranks, notify) as begun:
        with _uploading(composition, on_progress, stop) as upload:
            recorded = recorded_checksums(composition)
            written = _write_files(
                composition, begun, recorded, ranks, stop=stop, on_progress=on_progress, upload=upload
            )
            size = f"{composition.plan.num_bytes:,}"
            logger.info("wrote %d files, %s bytes, in %s", len(written.results), size, watch.lap())
            compare_with_records(
                composition, recorded, written.taken, written.results, ranks, stop, is_partly=bool(begun.kept)
            )
            logger.info("compared the sources with their records in %s", watch.lap())
            digests = check_sources(composition, written.results, begun.before, on_progress, stop, ranks)
            logger.info("checked that the sources are unchanged, in %s", watch.lap())

            def finish() -> None:
                _add_manifest(composition, written.results, digests, identity, begun.path, upload)
                check_written(composition, begun.path if upload is None else composition.out)
                logger.info("verified what was written in %s", watch.lap())
                stop.check()
                if begun.staging is not None and upload is None:
                    begun.staging.publish()

            ranks.run_on_first(finish)
        logger.info("published %s in %s", display_name(composition.out), watch.lap())
    if begun.staging is not None and begun.staging.folder.exists():
        notify(f"{begun.staging.folder} could not be removed; its content is no longer needed")
    return sum((result.moved for result in written.results), CopyStats())


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """Where this rank writes, and how far an earlier merge got."""

    path: Path
    journal: Journal
    kept: Mapping[str, tuple[Mark, ...]]
    """The marks of files that it resumes"""
    before: Mapping[str, FileFact]
    """The facts of the sources when the merge was first begun"""
    staging: Staging | None
    """On rank 0"""


@contextmanager
def _begin(composition: MergePlan, identity: Identity, ranks: Ranks, notify: Callable[[str], None]) -> Iterator[Begun]:
    """Lock the output on rank 0, resume or start over there, and give each rank a journal; a context manager around
    the rest of the merge.

    A rank holds the lock of its journal before any rank writes, so that the next merge sees whether it still runs.
    """
    staging: list[Staging] = []
    journals: list[Journal] = []
    with ExitStack() as stack:

        def lock_output() -> tuple[Mapping[str, tuple[Mark, ...]], Mapping[str, FileFact]]:
            if is_unfinished(composition.out):
                clear(composition.out)
            patience_s = LEAVING_S if ranks.world_size > 1 else 0.0
            staging.append(stack.enter_context(Staging(composition.out, composition.replaces, patience_s)))
            check_room(composition)
            findings = (finding for index in composition.indexes for finding in index.findings)
            if not composition.plan.links and any(finding.severity == ERROR for finding in findings):
                prove(composition)  # before everything is written in vain
            return resume(composition, identity, staging[0], notify)

        def begin_journal() -> None:
            if ranks.is_first:
                journals.append(staging[0].journal)
                return
            lock = Lock(rank_journal(staging_folder(composition.out), ranks.rank))
            lock.acquire()
            stack.callback(lock.release)
            journals.append(Journal(lock.fd))
            journals[0].begin(identity)

        try:
            kept, before = ranks.run_on_first(lock_output)
            ranks.run_on_all(begin_journal)
            path = staging_folder(composition.out) / OUT
            logger.info("writing in %s", path)
            yield Begun(
                path=path, journal=journals[0], kept=kept, before=before, staging=staging[0] if staging else None
            )
        except (Interrupted, StorageError, Unanswered) as error:
            if not staging:
                raise
            raise with_kept_bytes(error, composition, staging[0]) from error


@dataclass(frozen=True, slots=True)
class Written:
    """What all ranks have written, and read meanwhile."""

    results: Sequence[FileResult]
    """In the order of the plan"""
    taken: Taken[SourcePath]


def _write_files(
    composition: MergePlan,
    begun: Begun,
    recorded: Mapping[SourcePath, object],
    ranks: Ranks,
    *,
    stop: Stop,
    on_progress: Callable[[int], None],
    upload: Upload | None,
) -> Written:
    """Write this rank's share of the files. A file is not split."""
    plan, options = composition.plan, composition.options
    share = {*deal({file.path: file.num_bytes for file in plan.files}, ranks.world_size)[ranks.rank]}
    files = tuple(file for file in plan.files if file.path in share)
    own = plan if ranks.world_size == 1 else replace(plan, files=files)

    def write_share(report: Callable[[int], None]) -> tuple[dict[str, tuple[Any, ...]], Taken[SourcePath]]:
        taken = Taken(recorded)
        context = Context(
            [index.files for index in composition.indexes],
            begun.kept,
            report,
            # an upload can't be resumed
            begun.journal.add if upload is None else lambda path, mark: None,
            digest=options.checksum,
            stop=stop,
            clone=options.clone,
            taken=taken,
            direct=upload is None,
            upload=upload,
        )
        return {result.path: result.facts for result in execute(own, begun.path, context)}, taken

    shares = ranks.run_long(write_share, stop, on_progress)
    facts = {path: facts for results, _ in shares for path, facts in results.items()}
    taken = Taken(recorded)
    for _, others in shares:
        taken.include(others)
    return Written([FileResult(file, *facts[file.path]) for file in plan.files], taken)


def _uploading(
    composition: MergePlan, on_progress: Callable[[int], None], stop: Stop
) -> AbstractContextManager[Upload | None]:
    """Return the upload of an output, a context manager around making it; None for a folder of this machine."""
    if not isinstance(composition.out, RemotePath):
        return nullcontext()
    num_bytes = {file.path: file.num_bytes for file in composition.plan.files} | {CARD: 0, MANIFEST: 0}
    return Upload(composition.out, num_bytes, on_progress, stop)


def _add_manifest(
    composition: MergePlan,
    results: Sequence[FileResult],
    digests: Mapping[SourcePath, str],
    identity: Identity,
    folder: Path,
    upload: Upload | None,
) -> None:
    """Write the manifest and the model card, and complete the upload, if it is one."""
    framework = FRAMEWORKS[composition.framework]
    about = card(composition.report, __version__, composition.format, composition.target.stage, framework)
    readme = about.encode()
    content = make_manifest(composition, results, digests, readme, identity.digest(), now())
    for name, data in ((MANIFEST, json.dumps(content, indent=2).encode() + b"\n"), (CARD, readme)):
        write_durably(folder / name, data)
        if upload is not None:
            upload.take(folder / name, name, crc32(data))
    if upload is not None:
        upload.show()
