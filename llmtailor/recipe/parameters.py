"""mergekit's ``parameters:``. Of them passthrough knows one, ``scale``, which would change the weights."""

from __future__ import annotations

from llmtailor.errors import Problem
from llmtailor.recipe import grammar
from llmtailor.recipe.reader import Reader
from llmtailor.recipe.yamltext import Items, Scalar, Table, Value, is_null, place


def check_parameters(owner: Table, path: str, reader: Reader) -> None:
    """Refuse a scale other than 1 in the ``parameters`` of a mapping; name the others as idle."""
    value = owner.entries.get("parameters")
    inside = f"{path}.parameters" if path else "parameters"
    if value is None or is_null(value):
        return
    if not isinstance(value, Table):
        reader.flaw(value.line, inside, "parameters is no mapping of names to values", "leave parameters out")
        return
    scale = value.entries.get("scale")
    if scale is not None and not _is_one(scale):
        fix = "leave scale out; to scale weights alone use mergekit on the finished composite"
        reader.flaw(value.lines["scale"], f"{inside}.scale", f"scale would change weights: {grammar.NOT_SCALED}", fix)
    elif value.entries:
        what = f"parameters has no effect ({', '.join(value.entries)}): states are taken over as they are"
        where = place(reader.name, owner.lines["parameters"], inside)
        reader.notices.append(Problem(where, what, "leave parameters out"))


def _is_one(value: Value) -> bool:
    """Tell whether a setting is 1 whatever it is applied to: a number, a gradient, or values with filters."""
    if isinstance(value, Items):
        return all(_is_one(item) for item in value.items)
    if isinstance(value, Table):
        return "value" in value.entries and _is_one(value.entries["value"])
    return is_null(value) or _is_number_one(value)


def _is_number_one(value: Scalar) -> bool:
    try:
        return float(value.text) == 1
    except ValueError:
        return False
