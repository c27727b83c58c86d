"""``llmtailor.json``: the sources, parts, checksums and notices of a composite, as its manifest records them."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from llmtailor._version import __version__
from llmtailor.checkpoint.index import MEGATRON
from llmtailor.checkpoint.layout import LinkLayout
from llmtailor.compose.plan import MergePlan
from llmtailor.copying.copy import FileResult
from llmtailor.copying.recheck import SourcePath
from llmtailor.documents import encode
from llmtailor.errors import masked
from llmtailor.frameworks.files import CARD
from llmtailor.model.roles import MODULE, WEIGHT, State
from llmtailor.storage.checksums import DIGEST, combine, crc32, part_digest

SCHEMA_MANIFEST = "llmtailor.manifest/1"


def make_manifest(
    composition: MergePlan,
    results: Sequence[FileResult],
    digests: Mapping[SourcePath, str],
    readme: bytes,
    merge: str,
    created: str,
) -> dict[str, Any]:
    """Return the content of ``llmtailor.json``.

    ``digests`` are those of the source files; ``readme`` is recorded to detect later edits; ``merge`` is a digest of
    what was merged, to recognize the same merge.
    """
    # Skip ZeRO's rounded masters: a digest depends neither on the stage nor on names on disk.
    rounded = (MODULE, WEIGHT) if composition.target.has_masters or composition.format == MEGATRON else (MODULE,)
    crcs: dict[str, list[tuple[State, int, int]]] = defaultdict(list)
    for state, num_bytes, crc in _state_crcs(results, rounded):
        crcs[composition.structure.part_of[state.param]].append((state, num_bytes, crc))
    of_part = composition.structure.part_of
    linked = {of_part[one.state.param] for file in composition.plan.links for one in file.copies if one.state}
    digest_of = {part: part_digest(found) for part, found in crcs.items() if part not in linked}
    report, base = composition.report, composition.indexes[composition.base]
    return {
        "schema": SCHEMA_MANIFEST,
        "llmtailor_version": __version__,
        "merge": merge,
        "created": created,
        "base": report.base,
        "global_step": report.global_step,
        "world_size": report.world_size,
        "attempt": asdict(composition.attempt) if composition.attempt else None,
        "recipe": {"name": report.recipe, "text": masked(composition.recipe.text)},
        "is_converted": (composition.format, composition.framework) != (base.form.file_format, base.framework),
        **({"unclear": sorted(base.train.unclear)} if base.train.unclear else {}),
        "sources": [
            {
                "name": index.name,
                "path": f"{index.root.absolute()}",
                "global_step": index.global_step,
                "files": [
                    {"path": path, "num_bytes": fact.num_bytes} | _digest_entry(digests.get((number, path)))
                    for path, fact in index.files.items()
                ],
            }
            for number, index in enumerate(composition.indexes)
        ],
        "parts": [{**encode(row), "digest": digest_of.get(row.part.whole)} for row in report.parts],
        "optimizer_steps": encode(report.steps),
        "files": [
            {"path": one.path, "num_bytes": one.num_bytes, **_link_or_crc(composition, one)} | _digest_entry(one.digest)
            for one in results
        ],
        "card": {"path": CARD, "num_bytes": len(readme), "crc32": f"{crc32(readme):08x}"},
        "notices": encode(report.notices),
    }


def _link_or_crc(composition: MergePlan, file: FileResult) -> dict[str, Any]:
    if not isinstance(file.plan, LinkLayout):
        return {"crc32": f"{file.crc:08x}"}
    origin = file.plan.origin
    index = composition.indexes[origin.source]
    known = {"checkpoint": index.name, "path": origin.extent.path}
    return {"linked": {**known, "checksum": f"{file.plan.checksum:08x}"}}


def _state_crcs(results: Sequence[FileResult], left_out: Container[str]) -> Iterator[tuple[State, int, int]]:
    """Yield the number of bytes and the CRC-32 of every state but those of some kinds, as written."""
    runs: dict[State, array[int]] = defaultdict(lambda: array("Q"))  # millions, for a thousand ranks
    itemsizes: dict[State, int] = {}
    for run in (run for result in results for run in result.runs()):
        if run.state.kind not in left_out:
            runs[run.state].extend((run.begin, run.num_bytes, run.skipped, run.crc))
            if run.itemsize:
                itemsizes[run.state] = run.itemsize
    for state, packed in runs.items():
        # elements may be written more than once (a buffer on every rank): count them once, in order
        written = dict(zip(packed[::4], zip(packed[1::4], packed[2::4], packed[3::4], strict=True), strict=True))
        total, crc = sum(num_bytes for num_bytes, _, _ in written.values()), 0
        for begin in sorted(written):
            num_bytes, skipped, own = written[begin]
            if itemsize := itemsizes.get(state):  # runs may lie in each other: each counts at its place
                crc ^= combine(own, 0, total - begin * itemsize - num_bytes - skipped)
            else:
                crc = combine(crc, own, num_bytes)
        yield state, total, crc


def _digest_entry(digest: str | None) -> dict[str, str]:
    return {DIGEST: digest} if digest else {}
