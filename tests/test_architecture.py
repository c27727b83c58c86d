"""Imports go one way, and the merge path stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "llmtailor"
BASE = {"codes", "errors", "findings", "documents", "timing", "balance", "model", "storage", "checkpoint"}
MAY_IMPORT = {
    "errors": {"codes"},
    "findings": {"codes", "errors"},
    "documents": {"errors", "storage"},
    "timing": {"codes", "errors"},
    "model": {"codes", "errors"},
    "storage": {"codes", "errors", "model"},
    "checkpoint": {"codes", "errors", "findings", "model", "storage"},
    "containers": {"codes", "errors", "findings", "model", "storage", "checkpoint"},
    "loaders": {*BASE, "containers"},
    "formats": {*BASE, "containers", "loaders"},
    "engine": {*BASE},
    "ranks": {"codes", "errors", "findings", "timing", "storage"},
    "recipe": {*BASE},
    "verify": {*BASE, "containers", "loaders", "formats", "engine"},
    "compose": {*BASE, "containers", "loaders", "formats", "engine", "ranks", "recipe", "verify"},
    "policies": {"codes", "errors", "balance", "model"},
    "runs": {*BASE, "containers", "loaders", "formats", "engine", "recipe", "policies", "verify", "compose"},
    "salvage": {*BASE, "containers", "loaders", "formats", "engine", "recipe", "verify", "compose", "runs"},
    "attestation": {*BASE, "containers", "loaders", "formats", "ranks", "runs"},
    "saving": {
        *BASE,
        "containers",
        "loaders",
        "formats",
        "engine",
        "ranks",
        "policies",
        "runs",
        "attestation",
        "training",
    },
    "training": {"checkpoint", "model"},
    "integrations": {*BASE, "containers", "loaders", "formats", "policies", "runs", "saving", "ranks", "attestation"},
    "report": {*BASE, "containers", "loaders", "formats", "recipe", "verify", "compose", "runs"},
    "cli": {
        *BASE,
        *("containers", "loaders", "formats", "engine", "recipe", "verify", "compose", "runs", "salvage"),
        *("policies", "report", "saving", "ranks", "integrations"),
    },
    "codes": set(),
    "balance": set(),
}
"""Room -> the rooms it may import, besides itself."""
MAY_BE_HEAVY = {"training", "saving", "integrations"}
HEAVY = {"torch", "transformers", "deepspeed", "accelerate", "mergekit"}


def modules():
    return sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))


def imports(path: Path) -> set[str]:
    """Every module that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse((PACKAGE / path).read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module)
    return found


def may_import(path: Path, module: str) -> bool:
    room = path.parts[0].removesuffix(".py")
    if room in ("__init__", "__main__"):
        return True
    top, *below = module.split(".")
    if top == "llmtailor":
        return not below or below[0] in MAY_IMPORT[room] | {room}
    return top not in HEAVY or room in MAY_BE_HEAVY


def test_rooms_import_only_what_they_may():
    assert len(modules()) > 50
    wrong = [f"{path}: {module}" for path in modules() for module in imports(path) if not may_import(path, module)]
    assert not wrong


SHARED = {"common", "deepspeed_common"}
"""What formats share; a format imports no other one."""


def folders_of_formats() -> dict[str, set[str]]:
    """The folders in formats/, and which of them each imports."""
    found: dict[str, set[str]] = {}
    for path in modules():
        if path.parts[0] == "formats" and len(path.parts) == 3:
            parts = [module.split(".") for module in imports(path)]
            folders = {names[2] for names in parts if names[:2] == ["llmtailor", "formats"] and len(names) > 2}
            found.setdefault(path.parts[1], set()).update(folders)
    return {folder: imported & found.keys() - {folder} for folder, imported in found.items()}


def test_formats_know_each_other_only_through_what_they_share():
    found = folders_of_formats()
    assert found.keys() > SHARED
    assert not {folder: others for folder, imported in found.items() if (others := imported - SHARED)}
    assert found["common"] == set()  # so there is no circle


def modules_in_circles(imported_by: dict[str, set[str]]) -> set[str]:
    waiting = dict(imported_by)
    while free := [name for name, imported in waiting.items() if not imported & waiting.keys()]:
        for name in free:
            del waiting[name]
    return set(waiting)


def test_no_modules_import_each_other():
    names = {path: ".".join(path.with_suffix("").parts).removesuffix("__init__").rstrip(".") for path in modules()}
    known = {f"llmtailor.{name}": name for name in names.values() if name}
    found: dict[str, set[str]] = {}
    for path, name in names.items():
        tree = ast.parse((PACKAGE / path).read_text())
        froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
        pairs = [(node.module, f"{node.module}.{alias.name}") for node in froms for alias in node.names]
        found[name] = {known[one] for pair in pairs for one in [pair[pair[1] in known]] if one in known} - {name}
    assert not modules_in_circles(found)


def test_a_circle_would_be_seen():
    assert modules_in_circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == {"a", "b", "c"}


@pytest.mark.parametrize(
    ("path", "module"),
    [
        ("model/parts.py", "llmtailor.storage.local"),
        ("formats/trees.py", "torch.serialization"),
        ("loaders/read.py", "llmtailor.formats.registry"),
    ],
)
def test_such_imports_would_be_seen(path, module):
    assert not may_import(Path(path), module)


def test_files_can_be_read_in_one_sitting():
    assert not [path for path in modules() if len((PACKAGE / path).read_text().splitlines()) > 800]


def loaded_by(program: str) -> set[str]:
    code = f"import sys\n{program}\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    return set(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split())


def test_help_imports_nothing_that_takes_time():
    loaded = loaded_by(
        "from click.testing import CliRunner; from llmtailor.cli.main import cli; "
        "assert CliRunner().invoke(cli, ['--help']).exit_code == 0"
    )
    assert not loaded & (HEAVY | {"numpy", "yaml", "rich", "isal", "safetensors", "jinja2"})


def test_the_merge_path_imports_no_framework():
    loaded = loaded_by(
        "import llmtailor.cli.options, llmtailor.compose.write, llmtailor.verify.inspect, llmtailor.cli.tables, "
        "llmtailor.runs.thin, llmtailor.runs.gc, llmtailor.runs.simulate, llmtailor.report.page"
    )
    assert {"numpy", "yaml"} <= loaded
    assert not loaded & (HEAVY | {"safetensors", "jinja2"})


def test_a_merge_without_casts_imports_no_numpy():
    loaded = loaded_by("import llmtailor.cli.merge, llmtailor.cli.tables, llmtailor.compose.write")
    assert "yaml" in loaded
    assert not loaded & (HEAVY | {"safetensors", "numpy", "email"})


def test_policies_need_nothing_but_the_standard_library():
    loaded = loaded_by("import llmtailor.policies, llmtailor.checkpoint.lineage, llmtailor.recipe")
    assert not loaded & (HEAVY | {"numpy", "yaml", "isal", "safetensors"})
