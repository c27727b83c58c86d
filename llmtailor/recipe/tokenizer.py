"""``tokenizer_source``, ``tokenizer`` and ``chat_template``: which tokenizer files the output gets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from llmtailor.recipe import grammar
from llmtailor.recipe.reader import Reader
from llmtailor.recipe.words import nearest, quote
from llmtailor.recipe.yamltext import Items, Scalar, Table, Value, is_null

_JINJA = re.compile(r"\{[{%#]")


def read_tokenizer(given: Mapping[str, Value], reader: Reader, base: Path | None) -> Path | None:
    """Return the folder that the tokenizer comes from; None means the base."""
    if "tokenizer" not in given:
        alone = given.get("tokenizer_source")
        return None if alone is None else _read_source(alone, "tokenizer_source", reader, base)
    value = given["tokenizer"]
    if "tokenizer_source" in given:
        what = "tokenizer and tokenizer_source both say where the tokenizer comes from"
        reader.flaw(value.line, "tokenizer", what, "keep one of them")
    # mergekit takes the union of all tokenizers where source is missing, so it has to be said.
    table = reader.table(value, "tokenizer", grammar.TOKENIZER_KEYS, ["source"])
    if table is None:
        return None
    tokens, pad = table.entries.get("tokens"), table.entries.get("pad_to_multiple_of")
    if tokens is not None and not (is_null(tokens) or (isinstance(tokens, Table | Items) and not _content(tokens))):
        what = f"tokens would change embeddings: {grammar.SAME_VOCABULARY}"
        reader.flaw(table.lines["tokens"], "tokenizer.tokens", what, "leave tokens out")
    if pad is not None and not (is_null(pad) or (isinstance(pad, Scalar) and pad.text == "1")):
        what = f"padding would add rows to the embeddings: {grammar.SAME_VOCABULARY}"
        reader.flaw(table.lines["pad_to_multiple_of"], "tokenizer.pad_to_multiple_of", what, "leave it out")
    return (
        _read_source(table.entries["source"], "tokenizer.source", reader, base) if "source" in table.entries else None
    )


def _content(value: Table | Items) -> bool:
    return bool(value.entries if isinstance(value, Table) else value.items)


def _read_source(value: Value, path: str, reader: Reader, base: Path | None) -> Path | None:
    if isinstance(value, Scalar) and value.text in ("base", "union"):
        if value.text == "union":
            what = f"a union of tokenizers would change the vocabulary: {grammar.SAME_VOCABULARY}"
            reader.flaw(value.line, path, what, "write base, or the path of a checkpoint with the same vocabulary")
        return None
    source = reader.model(value, path)
    return None if source == base else source


def read_chat_template(value: Value, reader: Reader) -> str | None:
    """Return a Jinja text, or the name of one of mergekit's templates; None leaves the tokenizer's own.

    mergekit's ``auto`` takes the template that most sources have, which for checkpoints of one run is the tokenizer's.
    """
    text = reader.text(value, "chat_template", "auto, the name of a template, or a Jinja template")
    if text is None or text.strip() == "auto":
        return None
    if _JINJA.search(text):
        return text
    name = text.strip()
    if name in grammar.CHAT_TEMPLATES:
        return name
    what = f"{quote(name)} is neither a Jinja template nor the name of one"
    reader.flaw(value.line, "chat_template", what, nearest(name, ["auto", *grammar.CHAT_TEMPLATES]))
    return None
