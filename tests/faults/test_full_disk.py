"""A file system of our own, too small or filled up by somebody else while a merge writes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from faults.trials import large_scene

IN_A_NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount", "bash", "-euo", "pipefail", "-c"]
"""A mount of our own needs no privileges there, and is gone with the last process."""
MOUNT = 'mount -t tmpfs -o "size=$1" tmpfs "$2"; cd "$3"; '
OURS = f"{sys.executable} -m llmtailor merge recipe.yaml $2/out --quiet"


def in_a_small_file_system(script: str, size: int, place: Path, root: Path) -> subprocess.CompletedProcess[str]:
    try:
        subprocess.run([*IN_A_NAMESPACE, MOUNT, "bash", "1m", str(place), "/"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no file system can be mounted in a namespace here: {error}")
    words = [*IN_A_NAMESPACE, MOUNT + script, "bash", str(size), str(place), str(root)]
    environment = {"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": "/usr/bin:/bin:/usr/sbin:/sbin"}
    return subprocess.run(words, capture_output=True, text=True, timeout=120, env=environment)


@pytest.mark.long
def test_filled_up_meanwhile(tmp_path):
    """What is written is kept; once there is room, the same command goes on, and the result is the same.

    This is the kernel's own ENOSPC; test_faults.py makes it up at each operation.
    """
    (place := tmp_path / "small").mkdir()
    (root := tmp_path / "run").mkdir()
    large_scene(root, "merge", 64)
    script = f"""
        for attempt in 1 2 3 4 5; do  # the merge may be done before it is stopped
            {OURS} >/dev/null & merge=$!
            until (($(du -sm "$2" | cut -f1) >= 20)); do :; done
            kill -STOP $merge
            [[ -e $2/out ]] || break
            kill -CONT $merge
            wait $merge
            rm -r "$2/out"
        done
        head -c 1G /dev/zero >"$2/filler" || true
        kill -CONT $merge
        code=0; wait $merge || code=$?
        echo "code $code" "$(ls -A "$2" | xargs)"
        rm "$2/filler"
        {OURS}
        diff -r "$2/out" "$3/wanted" || true
        ls -A "$2"
    """
    subprocess.run([*OURS.replace("$2/out", "wanted").split()], cwd=root, check=True, capture_output=True)
    total = sum(path.stat().st_size for path in (root / "wanted").rglob("*") if path.is_file())
    result = in_a_small_file_system(script, total + (40 << 20), place, root)
    lines = result.stdout.splitlines()
    assert lines[0] == "code 8 .out.llmtailor-staging filler", result
    assert "No space left on device" in result.stderr
    assert "then rerun the same command: it resumes with" in result.stderr
    assert "note: resuming the merge" in result.stderr
    assert lines[1].startswith("wrote "), result
    differing = [line for line in lines[2:] if line.startswith("diff -r")]
    assert all("llmtailor.json" in line for line in differing), result  # the date, unless it is the same second
    rest = [line for line in lines[2:] if line[0] not in "<>-" and not line[0].isdigit() and line not in differing]
    assert rest == ["out"], result
