"""The size of a model's parts: from its config.json, or from the newest partial checkpoint of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from llmtailor.checkpoint.index import CheckpointIndex
from llmtailor.containers.json import read_json
from llmtailor.errors import SourceError
from llmtailor.formats.partial.manifest import FOLDER, read_manifest
from llmtailor.formats.plain.ask_transformers import describe_config
from llmtailor.formats.registry import display_name, find_structure, index_checkpoint, with_experts
from llmtailor.formats.trainer import CONFIG
from llmtailor.model.experts import split_experts
from llmtailor.model.find_parts import find_parts
from llmtailor.model.parts import ModelStructure, layer_of
from llmtailor.runs.folder import RunFolder

FIX = "name a config.json, a folder with one, or the folder of a run that has saved"


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What a save of a model can hold."""

    name: str
    structure: ModelStructure
    numels: Mapping[str, int]
    """Part -> trained params, for the parts that have any, in the order of the model"""

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.numels)

    @property
    def total(self) -> int:
        return sum(self.numels.values())


def is_run(path: Path) -> bool:
    """Return whether a folder is that of a run with partial checkpoints."""
    return (path / FOLDER).is_dir()


def size_of_config(path: Path, experts: bool = False) -> ModelSize:
    """Return the size of the model that a config.json, or a folder with one, describes; all params are trained.

    With ``experts``, each expert of a layer is a part. transformers builds the model without data in a process of its
    own, which takes seconds. Raises SourceError, UnsupportedCheckpoint if transformers does not know the model, and
    Unanswered if it does not answer.
    """
    file = path / CONFIG if path.is_dir() else path
    where = str(file)
    if not file.exists():
        raise SourceError.at(
            where, "the file does not exist", "name a config.json, a folder with one, or a run's folder"
        )
    config = read_json(file, where)
    facts = describe_config(config, where)
    numels = {name: math.prod(shape) for name, shape in facts.params.items()}
    structure = find_parts([*numels, *facts.buffers], dict(facts.tied), numels, config)
    if experts:
        structure = split_experts(structure, {**dict.fromkeys((*facts.buffers, *facts.tied), ()), **facts.params})
    name = file.absolute().parent.name if file.name == CONFIG else file.stem
    return ModelSize(name, structure, _by_part(structure, numels))


def newest_of_run(run: Path) -> CheckpointIndex:
    """Return the newest partial checkpoint of a run that can be read. Raises SourceError if there is none."""
    problem = SourceError.at(display_name(run), "it has no complete partial checkpoint", FIX)
    for path in reversed(RunFolder(run).complete().values()):
        try:
            return index_checkpoint(path)
        except SourceError as error:
            problem = error
    raise problem


def size_of_checkpoint(index: CheckpointIndex, experts: bool = False) -> ModelSize:
    """Return the size of the model in a partial checkpoint, without what is frozen.

    Each expert is a part if its run saves them so, or with ``experts``.
    """
    structure, manifest = find_structure(index), read_manifest(index.root, index.name)
    if experts or any(layer_of(part) != part for part in manifest.parts):
        structure = with_experts(structure, index)
    trained = {name: param.numel for name, param in index.params.items() if param.role == "trainable"}
    return ModelSize(index.name, structure, _by_part(structure, trained))


def _by_part(structure: ModelStructure, numels: Mapping[str, int]) -> dict[str, int]:
    found = dict.fromkeys(structure.parts, 0)
    pieces_of = structure.pieces_of
    for param, numel in numels.items():
        for name in pieces_of.get(param, [param]):
            found[structure.part_of[name]] += structure.pieces[name].numel if param in pieces_of else numel
    return {part: numel for part, numel in found.items() if numel}
