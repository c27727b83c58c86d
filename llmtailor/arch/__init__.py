"""From tensor names to the parts of a model: names in, an Anatomy out. Only `mergekit_data` reads files."""

from llmtailor.arch.hints import ArchHints, undecided
from llmtailor.arch.model import dissect_model
from llmtailor.arch.parts import dissect

__all__ = ["ArchHints", "dissect", "dissect_model", "undecided"]
