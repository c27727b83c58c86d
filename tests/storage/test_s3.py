"""The same with a real S3 server and s3fs, also in processes of their own; and with a network that fails."""

from __future__ import annotations

import subprocess
import sys

import pytest

from helpers.checkpoints import make_run
from helpers.commands import call, forget_urls, run_here
from helpers.files import TOLD, contents
from helpers.s3 import Proxy, environment, s3_server, settings

RECIPE = """\
merge_method: passthrough
base_model: s3://bucket/run/checkpoint-100
parts:
  - from: s3://bucket/run/checkpoint-90
    select: [odd]
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A server with a run, and the run."""
    with s3_server() as port:
        import s3fs

        root = make_run(tmp_path_factory.mktemp("s3") / "run", (90, 100))
        with pytest.MonkeyPatch.context() as patch:
            for name, value in settings(port).items():
                patch.setenv(name, value)
            store = s3fs.S3FileSystem(skip_instance_cache=True)
            store.mkdir("bucket")
            store.put(str(root), "bucket/run", recursive=True)
        yield port, root


def alone(port: int, *words: object, code: int = 0) -> str:
    command = [sys.executable, "-m", "llmtailor", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(port), check=False)
    assert "Traceback" not in done.stderr
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def test_a_composite_from_s3_to_s3(served, tmp_path, monkeypatch):
    """Nothing stays in the temporary folder."""
    port, run = served
    (temporary := tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    recipe, local = tmp_path / "recipe.yaml", tmp_path / "local.yaml"
    recipe.write_text(RECIPE)
    local.write_text(RECIPE.replace("s3://bucket/run", str(run)))
    alone(port, "merge", recipe, "s3://bucket/out/checkpoint-100", "--checksum")
    assert not [*temporary.iterdir()]
    call("merge", local, tmp_path / "local")
    call("convert", "s3://bucket/out/checkpoint-100", tmp_path / "again", env=settings(port))
    assert contents(tmp_path / "again", *TOLD) == contents(tmp_path / "local", *TOLD)
    forget_urls()
    assert run_here("latest", "s3://bucket/out", env=settings(port)).stdout == "s3://bucket/out/checkpoint-100\n"
    forget_urls()


@pytest.mark.long
@pytest.mark.parametrize("fault", [{"cut_every": 60_000}, {"busy_every": 6}])
def test_a_network_that_fails_now_and_then(served, tmp_path, fault):
    port, run = served
    proxy = Proxy(port, **fault)
    try:
        alone(proxy.port, "convert", "s3://bucket/run/checkpoint-100", tmp_path / "out", "--num-gpu", "3")
    finally:
        proxy.close()
    assert proxy.cut + proxy.refused > 0
    call("convert", run / "checkpoint-100", tmp_path / "local", "--num-gpu", "3")
    assert contents(tmp_path / "out", *TOLD) == contents(tmp_path / "local", *TOLD)


@pytest.mark.long
def test_no_server(served, tmp_path, monkeypatch):
    port, _ = served
    proxy = Proxy(port, busy_every=1)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    try:
        alone(proxy.port, "convert", "s3://bucket/run/checkpoint-100", tmp_path / "out", code=8)
    finally:
        proxy.close()
    assert not list(tmp_path.iterdir())
