"""Tokenizer files: which they are, and where a composite's come from."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from llmtailor.checkpoint.index import CheckpointIndex
from llmtailor.checkpoint.layout import Bytes, FileLayout
from llmtailor.errors import SourceError
from llmtailor.formats.trainer import carry, is_tokenizer_file
from llmtailor.storage.local import read_source
from llmtailor.storage.stand_in import see

MAX_BYTES = 256 << 20
"""Size limit of a tokenizer file; the largest have about 30 MB."""
CHAT_TEMPLATE = "chat_template.jinja"


def lay_out_tokenizer(
    base: CheckpointIndex, source: Path | None, chat_template: str | None, copy: bool
) -> list[FileLayout]:
    """Return the layouts of the tokenizer files: the base's, or another folder's; none unless ``copy``.

    ``chat_template`` (a Jinja text, or the name of one that mergekit includes) replaces the tokenizer's.
    Raises SourceError if the folder has no tokenizer files, or mergekit has no such template.
    """
    if not copy:
        return []
    if source is None:
        layouts = [carry(path, fact) for path, fact in base.files.items() if is_tokenizer_file(path)]
    else:
        layouts = _from_folder(source)
    if chat_template is None:
        return layouts
    text = Bytes(_template(chat_template).encode(), "chat_template of the recipe")
    return [layout for layout in layouts if layout.path != CHAT_TEMPLATE] + [FileLayout(CHAT_TEMPLATE, (text,))]


def _from_folder(source: Path) -> list[FileLayout]:
    try:
        paths = sorted(path for path in see(source).iterdir() if path.is_file() and is_tokenizer_file(path.name))
        files = [(path.name, read_source(path, f"{source}/{path.name}", MAX_BYTES)) for path in paths]
    except OSError as error:
        what = f"tokenizer_source can't be read: {error.strerror}"
        raise SourceError.at(source, what, "name a folder with tokenizer files") from error
    if not files:
        raise SourceError.at(source, "tokenizer_source has no tokenizer files", "name a folder with tokenizer files")
    return [FileLayout(name, (Bytes(data, f"tokenizer of {source}"),) if data else ()) for name, data in files]


def _template(value: str) -> str:
    if "{" in value:
        return value
    spec = importlib.util.find_spec("mergekit")  # finds it without importing it
    folders = spec.submodule_search_locations if spec else None
    path = Path(folders[0], "_data", "chat_templates", f"{value}.jinja") if folders else None
    if path is None or not path.is_file():
        fix = "write the template itself (Jinja), or install mergekit, which has the named ones"
        raise SourceError.at("chat_template", f"there is no template named {value!r}", fix)
    return path.read_text(encoding="utf-8")
