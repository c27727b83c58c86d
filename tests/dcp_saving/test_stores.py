"""Partial saves through dcp.save into object stores: only what is due is uploaded, the store copies the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsspec.core import url_to_fs
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

from helpers.commands import call
from helpers.s3 import Proxy, s3_server, settings
from llmtailor.dcp_saving.folders import StoreFolder
from llmtailor.errors import UsageError
from llmtailor.saving import DcpSaver
from saving.dcp_checks import MOMENTS, check, killed, oracle, read_store, tiny, train
from saving.dcp_loop import complete_in_store, step_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:Detected an existing")


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with s3_server() as port, pytest.MonkeyPatch.context() as patch:
        for name, value in settings(port).items():
            patch.setenv(name, value)
        fsspec.filesystem("s3", skip_instance_cache=True).mkdir("dcp-saves")  # moto keeps buckets in this process
        yield port


@pytest.fixture(params=["memory", pytest.param("s3", marks=pytest.mark.long)])
def url(request: Any, tmp_path: Path) -> str:
    if request.param == "memory":
        return f"memory://{tmp_path.name}"
    request.getfixturevalue("port")
    return f"s3://dcp-saves/{tmp_path.name}"


def ages(url: str) -> dict[str, int]:
    return {key: int(torch.as_tensor(one).flatten()[0]) for key, one in read_store(url).items()}


def save(saver: DcpSaver, url: str, step: int, rows: int = 4, **options: Any) -> None:
    dcp.save(tiny(step, rows), storage_writer=saver.writer(FsspecWriter(url, **options), step))


def sizes(url: str) -> dict[str, int]:
    fs, path = url_to_fs(url)
    fs.invalidate_cache()
    return {one["name"].rpartition("/")[2]: one["size"] for one in fs.ls(path, detail=True)}


@pytest.mark.parametrize("options", [{}, {"thread_count": 3}, {"single_file_per_rank": False}])
def test_a_folder_needs_no_older_one(url, options):
    saver, fs = DcpSaver("moments_in_turn:2"), url_to_fs(url)[0]
    for step in range(1, 6):
        save(saver, f"{url}/step-{step}", step, **options)
        if step > 1:
            fs.rm(f"{url}/step-{step - 1}", recursive=True)
    found = ages(f"{url}/step-5")
    assert [found[key] for key in MOMENTS] == [4, 4, 5, 5]
    assert {found[key] for key in found.keys() - {*MOMENTS}} == {5}


def test_copies_hold_only_what_is_needed(url):
    saver = DcpSaver("moments_in_turn:2")
    for step in (1, 2):
        save(saver, f"{url}/step-{step}", step)
    rows = FsspecReader(f"{url}/step-2").read_metadata().storage_data.values()
    used: Counter[str] = Counter()
    for row in rows:
        used[row.relative_path] += row.length
    there = {name: size for name, size in sizes(f"{url}/step-2").items() if name.endswith(".distcp")}
    assert used == there
    assert sum(name.startswith("__0_1000000") for name in there) == 1


def test_only_what_is_due_goes_up(port, tmp_path):
    """By the bytes on the wire: six tensors, then the two of the model and two moments, of one size."""
    url, rows = f"s3://dcp-saves/{tmp_path.name}", 20_000
    saver, tensor = DcpSaver("moments_in_turn:2"), rows * 3 * 4
    proxy, up = Proxy(port), []
    try:
        for step in (1, 2, 3):
            before = proxy.asked
            save(saver, f"{url}/step-{step}", step, rows, endpoint_url=f"http://127.0.0.1:{proxy.port}")
            up.append((proxy.asked - before) / tensor)
    finally:
        proxy.close()
    assert [int(one) for one in up] == [4, 3, 3]
    assert max(one % 1 for one in up) < 0.3, "the rest is small"
    assert {*ages(f"{url}/step-3").values()} == {2, 3}


def test_a_restart_goes_on_from_the_url_that_was_loaded(url, tmp_path):
    saver = DcpSaver("moments_in_turn:2")
    for step in (1, 2):
        save(saver, f"{url}/step-{step}", step)
    again = DcpSaver("moments_in_turn:2")
    again.resumed_from(f"{url}/step-1")
    save(again, f"{url}/step-3", 3)
    assert [ages(f"{url}/step-3")[key] for key in MOMENTS] == [3, 3, 1, 1]
    local = DcpSaver("moments_in_turn:2")
    local.resumed_from(f"{url}/step-3")  # which can't be linked to
    dcp.save(tiny(4), storage_writer=local.writer(FileSystemWriter(tmp_path / "step-4"), 4))
    other = DcpSaver("moments_in_turn:2")
    other.resumed_from(tmp_path / "step-4")
    save(other, f"{url}/step-5", 5)
    assert {*ages(f"{url}/step-5").values()} == {5}


def test_a_save_in_another_store_is_a_whole_one(port, tmp_path):
    saver = DcpSaver("moments_in_turn:2")
    urls = [f"memory://{tmp_path.name}", f"s3://dcp-saves/{tmp_path.name}"]
    for step, url in enumerate(urls, 1):
        save(saver, f"{url}/step-{step}", step)
    assert {*ages(f"{urls[1]}/step-2").values()} == {2}


def test_a_base_that_is_gone_or_changed(url):
    saver, fs = DcpSaver("moments_in_turn:2"), url_to_fs(url)[0]
    save(saver, f"{url}/step-1", 1)
    fs.rm(f"{url}/step-1", recursive=True)
    save(saver, f"{url}/step-2", 2)
    lost = next(name for name in sizes(f"{url}/step-2") if name.startswith("__0_100"))
    for name in sizes(f"{url}/step-2"):
        if name.endswith(".distcp") and name >= lost:
            fs.rm_file(f"{url}/step-2/{name}")
    save(saver, f"{url}/step-3", 3)
    assert {*ages(f"{url}/step-3").values()} == {3}
    save(saver, f"{url}/step-4", 4, rows=5)  # another shape
    assert {*ages(f"{url}/step-4").values()} == {4}


def test_a_stock_save_over_a_folder_ends_its_record(url):
    saver = DcpSaver("moments_in_turn:2")
    save(saver, f"{url}/step-1", 1)
    dcp.save(tiny(9), storage_writer=FsspecWriter(f"{url}/step-1"))
    save(saver, f"{url}/step-2", 2)
    assert {*ages(f"{url}/step-2").values()} == {2}


def test_saving_again_to_a_folder(url):
    saver = DcpSaver("moments_in_turn:2")
    for step in (1, 2):
        save(saver, f"{url}/step-{step}", step)
    before = ages(f"{url}/step-2")
    save(saver, f"{url}/step-1", 3)
    assert ages(f"{url}/step-2") == before
    assert [ages(f"{url}/step-1")[key] for key in MOMENTS] == [2, 2, 3, 3]


@pytest.mark.parametrize("what", ["copy", "write"])
def test_a_failed_save_publishes_nothing(url, monkeypatch, what):
    saver = DcpSaver("moments_in_turn:2")
    save(saver, f"{url}/step-1", 1)

    def fail(*_: object) -> None:
        raise OSError(5, "the store does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(StoreFolder, what, fail)
        with pytest.raises(dcp.api.CheckpointException, match="does not answer"):
            save(saver, f"{url}/step-2", 2)
    assert ".metadata" not in sizes(f"{url}/step-2")
    save(saver, f"{url}/step-3", 3)  # goes on from the first
    assert [ages(f"{url}/step-3")[key] for key in MOMENTS] == [3, 3, 1, 1]


def test_each_rank_copies_its_share(port, tmp_path):
    run, bucket = tmp_path / "run", f"dcp-saves/{tmp_path.name}"
    train(run, 2, 3, 1, "sync", "moments_in_turn", bucket, port)
    assert complete_in_store(f"s3://{bucket}") == [f"s3://{bucket}/step-3"]
    check(read_store(f"s3://{bucket}/step-3"), oracle(run, 3))


@pytest.mark.long
def test_a_restart_on_three_ranks(port, tmp_path):
    """The newest two folders are kept, and the commands read them."""
    run, bucket = tmp_path / "run", f"dcp-saves/{tmp_path.name}"
    url = f"s3://{bucket}"
    train(run, 2, 6, 2, "sync", "moments_in_turn", bucket, port)
    train(run, 3, 10, 2, "sync", "moments_in_turn", bucket, port)
    assert [step_of(one) for one in complete_in_store(url)] == [9, 10]
    for step in (9, 10):
        check(read_store(f"{url}/step-{step}"), oracle(run, step))
    (loaded,) = run.glob("loaded-*.pt")
    found = torch.load(loaded, weights_only=False)
    assert (found["folder"], found["ranks"]) == ("step-6", 3)
    wanted = oracle(run, 6)
    check({key: found["state"][key] for key in wanted}, wanted)
    call("verify", "--deep", f"{url}/step-10", env=settings(port))


def test_a_file_system_that_copies_nothing_is_refused():
    class Other(fsspec.AbstractFileSystem):
        protocol = "other"

    inner = FsspecWriter("memory://x/step-1")
    inner.fs.fs = Other()
    with pytest.raises(UsageError, match="writes to Other, which copies no files"):
        DcpSaver().writer(inner, 1)


@pytest.mark.long
def test_kills_at_random_moments(port, tmp_path):
    """What has a .metadata is complete, wherever two ranks were killed."""
    bucket, cut_off = f"dcp-saves/{tmp_path.name}", 0
    url = f"s3://{bucket}"
    arguments = ["2", "sync", "moments_in_turn", bucket, f"{port}"]
    for _ in killed(tmp_path / "run", arguments, kills=20, saves=30, seconds=1.5, seed=3):
        folders = complete_in_store(url)
        cut_off += len({one.split("/")[-2] for one in url_to_fs(url)[0].find(url)}) > len(folders)
        for folder in folders:
            check(read_store(folder), oracle(tmp_path / "run", step_of(folder)))
    assert cut_off, "no kill was in the middle of a save"
    print(f"{cut_off} kills in the middle of a save")
