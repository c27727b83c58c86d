"""Shared by the scripts that draw the pictures of the documentation."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path


def keep(picture: Path, draw: Callable[[], str], script: str, description: str | None) -> None:
    """Write a picture, or with ``--check`` exit with an error if it is out of date."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check, drawn = parser.parse_args().check, draw()
    if picture.is_file() and picture.read_text(encoding="utf-8") == drawn:
        return
    if check:
        sys.exit(f"error: out of date: {picture}\n  fix: run docs/make/{script}")
    picture.parent.mkdir(parents=True, exist_ok=True)
    picture.write_text(drawn, encoding="utf-8")
