"""Recipes that several tests merge."""

from __future__ import annotations

from pathlib import Path

_ODD_FROM = """
merge_method: passthrough
base_model: {base}
parts:
  - from: {older}
    select: [odd]
"""


def odd_layers_from(older: Path, base: Path, folder: Path) -> Path:
    """Write a recipe that takes the odd layers from an older checkpoint."""
    (folder / "recipe.yaml").write_text(_ODD_FROM.format(base=base, older=older))
    return folder / "recipe.yaml"
