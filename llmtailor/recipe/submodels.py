"""The submodels that ``modules:`` names: text model, vision tower, projector. Pure.

mergekit's architecture data says what belongs to each, if it knows the model (`Anatomy.modules`). Otherwise a name like
``text_decoder`` means the text model, and any other the parts whose path contains it.
"""

from __future__ import annotations

from collections import defaultdict

from llmtailor.arch.names import is_aside, place_of
from llmtailor.core.anatomy import EMBED, HEAD, NORM, Anatomy
from llmtailor.recipe.words import Misspelt, layer_number, nearest, quote

TEXT_WORDS = frozenset(
    {"default", "text_decoder", "text_model", "text", "language_model", "language", "llm", "lm", "decoder", "model"}
)
"""What the text model is called; ``default`` is mergekit's name for a model without submodels."""


def is_text(module: str, anatomy: Anatomy) -> bool:
    """Tell whether this is the submodel whose layers are the model's layers."""
    if module in anatomy.modules:
        return any(layer_number(part) is not None for part in anatomy.modules[module])
    return module in TEXT_WORDS


def parts_of(module: str, anatomy: Anatomy) -> set[str]:
    """Return the parts of a submodel. Raises Misspelt."""
    if module in anatomy.modules:
        found = set(anatomy.modules[module])
    elif is_text(module, anatomy):
        found = {part for part in anatomy.parts if _is_of_text(part)}
    else:
        path = module.split(".")
        found = {part for part in anatomy.parts if layer_number(part) is None and _contains(part.split("."), path)}
    if not found:
        beside = dict.fromkeys(part.split(".")[0] for part in anatomy.parts if not _is_of_text(part))
        mend = nearest(module, list(dict.fromkeys([*(anatomy.modules or ["text_decoder"]), *beside])))
        raise Misspelt(f"it can't be told which tensors belong to the module {quote(module)}", f"{mend}; {_GLOBS}")
    return found


def layers_of(module: str, anatomy: Anatomy) -> dict[str, int | None]:
    """Return the tensors in the layers of a submodel beside the text model, with their numbers. Raises Misspelt."""
    parts = parts_of(module, anatomy)
    stacks: dict[str, dict[str, int | None]] = defaultdict(dict)
    for name, part in anatomy.part_of.items():
        place = place_of(name)
        # An nn.Sequential has numbers too, but its items are plain modules, not layers.
        if part in parts and place.number is not None and place.depth > 1:
            stacks[part.rpartition(".")[0]][name] = place.number
    if not stacks:
        fix = f"to take the whole of it write models: [{{model: PATH}}]; {_GLOBS}"
        raise Misspelt(f"the module {quote(module)} has no layers that slices could name", fix)
    if len(stacks) > 1:
        what = f"the module {quote(module)} has several stacks of layers, and slices can't say which is meant"
        raise Misspelt(what, f"they are {', '.join(stacks)}; {_GLOBS}")
    return next(iter(stacks.values()))


_GLOBS = 'parts: can name any tensors with globs, e.g. select: "*visual.blocks.[0-7].*"'


def _is_of_text(part: str) -> bool:
    if part in (EMBED, NORM, HEAD) or layer_number(part) is not None:
        return True
    return not is_aside(tuple(part.split(".")))


def _contains(path: list[str], wanted: list[str]) -> bool:
    return any(path[at : at + len(wanted)] == wanted for at in range(len(path)))
