"""Where this repository and its tests are, so that a test can move between folders."""

from __future__ import annotations

from pathlib import Path

ROOT = next(folder for folder in Path(__file__).resolve().parents if (folder / "pyproject.toml").exists())
SUPPORT = ROOT / "tests" / "support"
"""Put on the path of programs that tests start"""
