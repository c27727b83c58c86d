"""What is packaged and how it is tested: the wheel, the declared versions, and the workflow that CI follows."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.version import Version

import llmtailor
from helpers.places import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:  # pytest brings it along
    import tomli as tomllib

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOW: dict[str, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
PYTHON = "Programming Language :: Python :: "


def test_the_minimum_versions_are_those_declared():
    extras = PROJECT["optional-dependencies"]
    optional = ("train", "report", "remote")
    named = [*PROJECT["dependencies"], *(line for extra in optional for line in extras[extra])]
    declared = dict(line.partition(";")[0].split(">=") for line in named)
    text = (ROOT / "scripts" / "constraints-minimum.txt").read_text()
    pinned = {name.lower(): version for name, version in re.findall(r"^([\w-]+)==(\S+)$", text, re.MULTILINE)}
    assert pinned.keys() == declared.keys()
    assert not [name for name, version in declared.items() if Version(pinned[name]) != Version(version)]


def test_the_workflow_covers_the_declared_pythons_with_scripts_that_exist():
    matrix = WORKFLOW["jobs"]["test"]["strategy"]["matrix"]
    declared = [name.removeprefix(PYTHON) for name in PROJECT["classifiers"] if name.startswith(f"{PYTHON}3.")]
    assert matrix["python"] == declared
    assert PROJECT["requires-python"] == f">={declared[0]}"
    assert matrix["include"][0]["python"] == declared[0]
    named = {name for job in WORKFLOW["jobs"].values() for name in re.findall(r"scripts/[\w.-]+", yaml.dump(job))}
    assert "scripts/test.sh" in named
    assert not [name for name in named if not (ROOT / name).is_file()]


def test_every_action_is_pinned_to_a_commit():
    used = [step["uses"] for job in WORKFLOW["jobs"].values() for step in job["steps"] if "uses" in step]
    assert used
    assert not [one for one in used if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", one)]


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--quiet", *arguments], check=True, timeout=300)


@pytest.mark.long
def test_the_wheel_holds_the_package_and_runs_from_anywhere(tmp_path):
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout
    source = tmp_path / "source"
    for name in filter(None, tracked.decode().split("\0")):  # not the working tree: `build/` would be left in it
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    pip("wheel", "--no-deps", "--wheel-dir", str(tmp_path), str(source))
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
        metadata = archive.read(next(name for name in archive.namelist() if name.endswith("/METADATA"))).decode()
    package = ROOT / "llmtailor"
    files = {*package.rglob("*.py"), *package.glob("report/templates/*.j2"), package / "py.typed"}
    assert held == {str(path.relative_to(ROOT)) for path in files}
    assert f"\nVersion: {llmtailor.__version__}\n" in metadata

    # a clean environment that has this one's packages, except llmtailor
    home = tmp_path / "venv"
    venv.create(home, with_pip=False)
    (site,) = home.glob("lib/python*/site-packages")
    shared = [path for path in map(Path, sys.path) if path.name in ("site-packages", "dist-packages")]
    (site / "shared.pth").write_text("".join(f"{path}\n" for path in shared))
    pip("--python", str(home / "bin" / "python"), "install", "--no-deps", "--force-reinstall", str(wheel))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*command: str) -> str:
        return subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True).stdout

    assert "Usage: llmtailor" in run(str(home / "bin" / "llmtailor"), "--help")
    program = "import llmtailor; llmtailor.plan_merge; print(llmtailor.__version__, llmtailor.__file__)"
    assert run(str(home / "bin" / "python"), "-c", program).split() == [
        llmtailor.__version__,
        str(site / "llmtailor" / "__init__.py"),
    ]
