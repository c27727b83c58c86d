"""Two levels of storage: a disk of the node first, then a shared folder; or the run's folder, then a mirror."""

from __future__ import annotations

import json
import shutil
import signal
import time

import fsspec
import pytest

from helpers.commands import call
from llmtailor.background import retrying, tiers
from llmtailor.errors import UsageError
from llmtailor.storage import remote
from saving.loop import Loop, log_of
from trainings.harness import start_ranks


@pytest.fixture
def make(tmp_path, monkeypatch):
    monkeypatch.setattr(retrying, "PAUSE_S", (0.05, 0.2))
    made = []

    def start(step=0, **options):
        staging = {"staging_dir": tmp_path / "node"} if "mirror" not in options else {}
        run = Loop(tmp_path / "run", **{"policy": "full", **staging, **options})
        made.append(run)
        return run.start(step)

    yield start
    for run in made:
        run.saver.close()


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def names(folder):
    return sorted(path.parent.name for path in folder.glob("partial/*/manifest.json"))


def until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_saves_are_on_the_node_first_and_then_shared(make, tmp_path):
    run = make(policy="parity")
    for _ in range(3):
        assert run.make_saves().path.parents[1] == tmp_path / "node"
    run.saver.close()
    assert names(tmp_path / "run") == ["step-00000001", "step-00000002", "step-00000003"]
    assert names(tmp_path / "node") == ["step-00000003"]  # the others are of no use any more
    assert files(tmp_path / "node/partial/step-00000003") == files(tmp_path / "run/partial/step-00000003")
    assert [line["step"] for line in log_of(tmp_path / "run")] == [1, 2, 3]
    assert all(line["copied_s"] >= line["publish_s"] for line in log_of(tmp_path / "run"))
    run.check(1, tmp_path / "out")


def test_a_level_that_is_away_costs_nothing_once_it_is_back(make, tmp_path, monkeypatch, caplog):
    run = make()
    put, is_away = tiers.SharedFolder.put, True

    def put_if_there(*args):
        if is_away:
            raise OSError(116, "Stale file handle")
        put(*args)

    monkeypatch.setattr(tiers.SharedFolder, "put", put_if_there)
    run.make_saves(3)
    until(lambda: "copying step 1 failed" in caplog.text)
    assert not names(tmp_path / "run")
    assert len(names(tmp_path / "node")) == 3
    is_away = False
    run.saver.close()
    assert len(names(tmp_path / "run")) == 3
    assert "step 1 copied after retries" in caplog.text


def test_what_was_not_copied_is_copied_when_the_run_goes_on(make, tmp_path, monkeypatch, caplog):
    run = make(write_timeout=1.0)
    run.make_saves()
    until(lambda: names(tmp_path / "run"))
    with monkeypatch.context() as away:
        away.setattr(tiers.SharedFolder, "put", lambda *_: 1 / 0)
        run.make_saves()
        run.saver.close()
    assert "the saves of steps 2" in caplog.text
    assert names(tmp_path / "run") == ["step-00000001"]
    again = make(step=2)
    assert again.saver.ledger.step == 2
    assert names(tmp_path / "run") == ["step-00000001", "step-00000002"]
    assert not names(tmp_path / "node")
    again.make_saves()
    again.saver.close()
    assert names(tmp_path / "run")[-1] == "step-00000003"


def test_a_lost_node_costs_only_what_was_not_copied(make, tmp_path, monkeypatch):
    run = make(policy="parity", write_timeout=1.0)
    run.make_saves(2)
    until(lambda: len(names(tmp_path / "run")) == 2)
    monkeypatch.setattr(tiers.SharedFolder, "put", lambda *_: 1 / 0)
    run.make_saves()
    run.saver.close()
    both = tmp_path / "both"
    done = call("merge", "--run", run.run, "--also", tmp_path / "node", both, "--json")
    assert {part["step"] for part in json.loads(done.stdout)["parts"]} == {2, 3}
    assert (both / "model.safetensors").exists()
    for _ in range(2):  # by default in the run's folder, where a resume looks for it; and only once
        again = call("merge", "--run", run.run, "--also", tmp_path / "node", "--json")
        assert (tmp_path / "run" / "checkpoint-3" / "model.safetensors").exists()
    assert json.loads(again.stdout)["is_there_already"]
    assert [path.name for path in tmp_path.glob("*/checkpoint-*")] == ["checkpoint-3"]
    shutil.rmtree(tmp_path / "node")
    run.check(2, tmp_path / "out")


def test_what_several_nodes_hold_is_copied_when_they_start_again(tmp_path):
    """Each node holds the files of its ranks; two ranks take themselves for nodes."""
    start_ranks("saving.processes", ["stations", tmp_path], 2, tmp_path)
    assert names(tmp_path / "run") == ["step-00000001", "step-00000002", "step-00000003"]
    assert not names(tmp_path / "node-0") and not names(tmp_path / "node-1")


def test_what_is_saved_last_is_copied_before_the_end(make, tmp_path):
    """Also if nothing was copied for longer than a write may take."""
    run = make(write_timeout=1.0)
    run.train()
    time.sleep(1.2)
    run.save().wait(60)
    run.saver.close()
    assert names(tmp_path / "run") == ["step-00000001"]


def test_a_save_that_somebody_removes_is_not_waited_for(make, tmp_path, monkeypatch, caplog):
    run, put = make(), tiers.SharedFolder.put
    monkeypatch.setattr(tiers.SharedFolder, "put", lambda *_: 1 / 0)
    run.make_saves(2)
    shutil.rmtree(tmp_path / "node/partial/step-00000001")
    monkeypatch.setattr(tiers.SharedFolder, "put", put)
    run.saver.close()
    assert "step 1 was not copied: it was removed" in caplog.text
    assert names(tmp_path / "run") == ["step-00000002"]


def test_a_copy_that_differs_is_not_taken(make, tmp_path, monkeypatch, caplog):
    """Every copy is read back."""
    run = make()
    crcs, crc_of = [True], tiers.OpenFiles.crc_of
    monkeypatch.setattr(tiers.OpenFiles, "crc_of", lambda *where: crc_of(*where) ^ (crcs.pop() if crcs else 0))
    run.make_saves()
    until(lambda: names(tmp_path / "run"))
    assert "the copy differs from the original" in caplog.text
    run.check(1, tmp_path / "out")


def test_a_run_may_keep_few_checkpoints_on_both_levels(make, tmp_path):
    run = make(keep_composable=1)
    run.make_saves(4)
    run.saver.close()
    assert names(tmp_path / "run") == ["step-00000004"]


def test_another_runs_saves_are_not_touched(make, tmp_path):
    run = make(write_timeout=1.0)
    run.make_saves()
    run.saver.close()
    other = Loop(tmp_path / "other", policy="full", staging_dir=tmp_path / "node")
    with pytest.raises(UsageError, match="it holds saves of another run, of steps 1"):
        other.start()
    other.saver.close()
    assert names(tmp_path / "node") == ["step-00000001"]


def test_a_mirror_gets_the_manifest_last(make, tmp_path, monkeypatch):
    url = "memory://bucket/run"
    fs, root = fsspec.core.url_to_fs(url)
    order = []
    for name in ("put_file", "pipe_file"):
        call = getattr(fs, name)
        monkeypatch.setattr(
            type(fs), name, lambda self, a, b, call=call, **more: (order.append((a, b)), call(a, b, **more))[1]
        )
    run = make(policy="parity", mirror=url, keep_composable=2)
    run.make_saves(5)
    run.saver.close()
    there = sorted(path.split("/")[-2] for path in fs.glob(f"{root}/partial/*/manifest.json"))
    assert there == names(tmp_path / "run") and len(there) == 3
    for step in there:
        found = {path.split("/")[-1]: fs.cat_file(path) for path in fs.ls(f"{root}/partial/{step}", detail=False)}
        assert found == files(tmp_path / "run/partial" / step)
    ends = [place for place in order if "manifest.json" in str(place[0])]
    assert len(ends) == 5
    for end in ends:
        folder = end[0].rpartition("/")[0]
        later = order[order.index(end) + 1 :]
        assert not any(folder in str(place[1]) for place in later)


def test_a_request_of_a_mirror_is_repeated_at_once(make, monkeypatch, caplog):
    """As one of an upload: a store that answers the second time delays nothing."""
    fs, root = fsspec.core.url_to_fs(url := "memory://bucket/again")
    put_file, faults = fs.put_file, [OSError("slow down")]

    def put(self, *args, **more):
        if faults:
            raise faults.pop()
        return put_file(*args, **more)

    monkeypatch.setattr(type(fs), "put_file", put)
    monkeypatch.setattr(remote, "FIRST_PAUSE_S", 0.01)
    run = make(policy="full", mirror=url)
    run.make_saves()
    run.saver.close()
    assert not faults and fs.exists(f"{root}/partial/step-00000001/manifest.json")
    assert "can't be copied" not in caplog.text


@pytest.mark.parametrize("has_record", [True, False])
def test_a_mirror_belongs_to_one_run(make, tmp_path, has_record):
    """Another run that begins anew is refused before it copies anything; one that goes on from there is not."""
    url = f"memory://bucket/{tmp_path.name}"
    fs, root = fsspec.core.url_to_fs(url)
    first = make(policy="parity", mirror=url)
    first.make_saves(3)
    first.saver.close()
    if not has_record:  # as a mirror that was filled by hand
        fs.rm(f"{root}/partial/attempts.json")
    there = {path: fs.cat_file(path) for path in fs.find(root)}
    (tmp_path / "run").rename(tmp_path / "lost")
    with pytest.raises(UsageError, match="it holds saves of another run"):
        make(policy="parity", mirror=url)
    assert {path: fs.cat_file(path) for path in fs.find(root)} == there
    shutil.rmtree(tmp_path / "run")
    call("merge", "--run", url, tmp_path / "out")
    state = json.loads((tmp_path / "out" / "trainer_state.json").read_text())
    again = Loop(tmp_path / "run", policy="parity", mirror=url)
    again.step = 3
    again.saver.start(3, state)
    again.make_saves()
    again.saver.close()
    assert fs.exists(f"{root}/partial/step-00000004/manifest.json")
    attempts = json.loads(fs.cat_file(f"{root}/partial/attempts.json"))["attempts"]
    assert [one["resumed_at"] for one in attempts] == [0 if has_record else 3, 3]


def test_saves_of_two_runs_in_one_folder_are_refused(tmp_path):
    """As a mirror of before may hold them: neither is taken for the other's past."""
    for name, count in (("one", 3), ("other", 2)):
        run = Loop(tmp_path / name, policy="parity").start(0)
        run.make_saves(count)
        run.saver.close()
    for step in (1, 2):
        shutil.rmtree(tmp_path / f"one/partial/step-0000000{step}")
        shutil.copytree(tmp_path / f"other/partial/step-0000000{step}", tmp_path / f"one/partial/step-0000000{step}")
    (tmp_path / "one/partial/attempts.json").unlink()
    told = call("merge", "--run", tmp_path / "one", code=4).stderr
    assert "it holds saves of 2 runs: step-00000003; step-00000001, step-00000002" in told


def test_a_mirror_that_cannot_be_used_is_refused(tmp_path):
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(UsageError, match="can't be used"):
        Loop(tmp_path / "run", mirror="nosuch://bucket/run")
    assert signal.getsignal(signal.SIGTERM) is handler
