"""Stock checkpoints that are saved in the background: of DeepSpeed, the Trainer, accelerate, and any file of torch."""

from __future__ import annotations

import errno
import json
import pickletools
import shutil
import threading
import time
import weakref
import zipfile

import fsspec
import pytest
import safetensors.torch
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from transformers.trainer_utils import get_last_checkpoint

from llmtailor.background import retrying
from llmtailor.background.options import stock_options
from llmtailor.background.snapshot import Snapshot
from llmtailor.errors import UsageError
from llmtailor.saving import SaveFailed, attach, attach_accelerator
from llmtailor.stock_saving import mirror as stock_mirror
from llmtailor.storage import remote
from llmtailor.storage.local import Lock
from saving.loop import Disk
from saving.stock_loops import Plain
from trainings.alone import Alone
from trainings.harness import TrainingFailed, start_ranks

pytestmark = pytest.mark.real
SMALLEST = 1 << 20


@pytest.fixture
def disk(monkeypatch):
    made = Disk(monkeypatch)
    yield made
    made.recover()


def files(folder):
    return {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}


def records(path):
    """What a file of torch's holds, without the hash of it that torch adds."""
    with zipfile.ZipFile(path) as zipped:
        assert zipped.testzip() is None
        names = [name for name in zipped.namelist() if not name.endswith("/.data/serialization_id")]
        read = {name: zipped.read(name) for name in names}
    return {name: told(data) if name.endswith(".pkl") else data for name, data in read.items()}


def told(data):
    """What a pickle says; whether two equal strings are one object differs from run to run."""
    found, memo = [], {}
    for code, value, _ in pickletools.genops(data):
        if code.name.endswith("PUT"):
            memo[value] = found[-1]
        else:
            found.append(memo[value] if code.name.endswith("GET") else (code.name, value))
    return found


def check_same(stock, lazy, but=()):
    """The same files, with the same bytes in all records, except pickles of arguments that name the folder."""
    assert files(stock).keys() == files(lazy).keys()
    for name, path in files(stock).items():
        other = lazy / name
        if path.name in but:
            continue
        if zipfile.is_zipfile(path):
            assert records(path) == records(other), name
        else:
            assert path.read_bytes() == other.read_bytes(), name


# --- DeepSpeed -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stages", [(2, 3), pytest.param((0, 1), marks=pytest.mark.long)], ids=str)
def test_deepspeeds_files_are_those_of_the_step_and_resume(tmp_path, stages):
    """Everything is copied and written as late as possible, while training changes it."""
    start_ranks("saving.stock_loops", ["engines", tmp_path, *stages], 2, tmp_path)
    for stage in stages:
        check_same(tmp_path / f"{stage}" / "stock", tmp_path / f"{stage}" / "lazy")
    for rank in range(2):
        losses = json.loads((tmp_path / f"losses-{rank}.json").read_text())
        assert [losses[f"{stage}"][0] for stage in stages] == [losses[f"{stage}"][1] for stage in stages]


def test_after_a_kill_the_checkpoint_before_is_as_it_was(tmp_path):
    run = tmp_path / "run"
    with pytest.raises(TrainingFailed, match="code -9"):
        start_ranks("saving.stock_loops", ["killed", tmp_path], 2, tmp_path)
    assert (run / "latest").read_text() == "global_step1"
    assert [path.name for path in run.glob("*global_step*")] == [".global_step2.llmtailor-saving", "global_step1"]
    start_ranks("saving.stock_loops", ["resumed", tmp_path], 2, tmp_path)
    assert (run / "latest").read_text() == "global_step2"
    assert sorted(path.name for path in run.glob("*global_step*")) == ["global_step1", "global_step2"]


@pytest.mark.long
def test_tags_of_deepspeed(tmp_path):
    start_ranks("saving.stock_loops", ["tags", tmp_path], 2, tmp_path)
    assert {path.name for path in (tmp_path / "run").iterdir() if path.is_dir()} == {"of-0", "of-1", "same"}


# --- any torch file --------------------------------------------------------------------------------------------------


@pytest.fixture
def plain(tmp_path):
    made = []

    def make(**options):
        made.append(Plain(tmp_path / "run", **options))
        return made[-1]

    yield make
    for one in made:
        one.saver.close()


def test_any_object_is_saved_as_torch_saves_it(tmp_path, plain):
    whole = torch.arange(3000.0)
    value = {
        "views": [whole[5:9], whole[10:].view(2, -1), whole],
        "strided": torch.arange(2400).view(40, 60).t(),
        "kinds": [torch.ones(3, dtype=dtype) for dtype in (torch.bfloat16, torch.bool, torch.complex64, torch.int8)],
        "none": torch.empty(0, 4),
        "storage": whole.untyped_storage(),
        "param": torch.nn.Parameter(torch.ones(2000)),
        "other": {"a": (1, None, "text"), "size": torch.Size((2, 3)), "type": torch.float16},
    }
    del value["storage"]  # torch refuses it beside tensors of another dtype
    run = plain()
    run.train()
    value["states"] = run.states()
    torch.save(value, tmp_path / "states.pt")
    run.save(value=value).wait(60)
    assert records(tmp_path / "states.pt") == records(run.folder / "step-1" / "states.pt")


def test_what_a_library_writes_is_taken_over_in_its_thread_only(tmp_path, plain):
    run = plain()
    run.train()
    folder = run.folder / "step-1"
    with run.saver.saving(folder, 1), run.saver.intercept_writes():
        at = run.saver.open_at
        torch.save(obj=run.states(), f=at / "states.pt")
        safetensors.torch.save_file(tensors=run.model.state_dict() | {"1.weight": torch.ones(3)}, filename=at / "model")
        torch.save(run.states(), at / "old.pt", _use_new_zipfile_serialization=False)
        torch.save([1], tmp_path / "elsewhere.pt")
        other = threading.Thread(target=torch.save, args=([2], at / "other.pt"))
        other.start()
        other.join()
        assert {path.name for path in at.iterdir()} == {"old.pt", "other.pt"}
    run.saver.pending.wait(60)
    assert {path.name for path in folder.iterdir()} == {"states.pt", "model", "old.pt", "other.pt"}
    safetensors.torch.save_file(run.model.state_dict() | {"1.weight": torch.ones(3)}, tmp_path / "model")
    assert (tmp_path / "model").read_bytes() == (folder / "model").read_bytes()


def test_what_torch_refuses_is_refused(plain):
    run, one = plain(), torch.ones(2000)
    for value, what in ((lambda: 0, "pickle"), ([one, one.view(torch.int32)], "different types")):
        with pytest.raises(Exception, match=what):
            run.save(value={"a": value})
        run.saver.finish()
    assert not [*run.folder.iterdir()]


def test_what_is_not_the_optimizers_may_change_at_once(tmp_path, plain):
    run = plain()
    run.train()
    other = torch.ones(5000)
    torch.save(value := {**run.states(), "other": other}, tmp_path / "states.pt")
    save = run.save(value=value)
    with torch.no_grad():
        other.zero_()
        run.model.counts.zero_()
        run.model[3].weight.zero_()
    save.wait(60)
    assert records(tmp_path / "states.pt") == records(run.folder / "step-1" / "states.pt")


def test_copies_are_freed_once_they_are_written(plain, monkeypatch):
    run, copies = plain(), []
    copy = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda *given, **how: (copies.append(made := copy(*given, **how)), made)[1])
    run.train()
    run.save(value={"other": torch.ones(5000)}).wait(60)
    refs = [weakref.ref(one) for one in copies]
    copies.clear()
    assert refs and not any(ref() is not None for ref in refs)


def test_a_master_that_changes_too_early_makes_the_save_fail(plain, monkeypatch):
    run = plain()
    run.train()
    copy, may_copy = Snapshot._copy, threading.Event()
    monkeypatch.setattr(Snapshot, "_copy", lambda *args: (may_copy.wait(60), copy(*args)))
    save = run.save()
    with torch.no_grad():
        run.model[0].weight.mul_(2)
    may_copy.set()
    with pytest.raises(SaveFailed, match="a tensor changed outside optimizer"):
        save.wait(60)


def test_a_full_disk_costs_a_save(plain, disk, caplog):
    run = plain()
    run.train()
    run.save("same").wait(60)
    before = records(run.folder / "same" / "states.pt")
    run.train()
    disk.error = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(SaveFailed, match="No space left"):
        run.save("same").wait(60)
    assert "the save at step 2 failed; training continues without it" in caplog.text
    assert [path.name for path in run.folder.iterdir()] == ["same"]
    assert records(run.folder / "same" / "states.pt") == before
    disk.recover()
    run.save("same").wait(60)
    assert records(run.folder / "same" / "states.pt") != before


def test_a_folder_that_can_not_be_made_costs_a_save(plain, caplog):
    run = plain()
    run.train()
    run.folder.write_text("a file")
    assert run.save() is None
    assert "the save at step 1 failed; training continues without it" in caplog.text


def test_what_another_process_saves_beside_it_stays(plain, caplog):
    run = plain()
    run.train()
    left, live = (run.folder / f".{name}.llmtailor-saving" for name in ("killed", "other"))
    for one in (left, live):
        (one / "states").mkdir(parents=True)
    lock = Lock(live / "lock")
    lock.acquire()
    run.save("same").wait(60)
    assert {path.name for path in run.folder.iterdir()} == {"same", live.name}
    assert run.save("other") is None
    assert "another process is saving the same checkpoint" in caplog.text
    lock.release()
    run.save("other").wait(60)
    assert {path.name for path in run.folder.iterdir()} == {"same", "other"}


class Lomo(torch.optim.AdamW):
    """By its name"""


def test_an_optimizer_that_steps_in_the_backward_pass_stops_training(plain, caplog):
    run = plain(kind=Lomo)
    run.train()
    assert run.save().is_done
    assert "saves stop training until they are complete: background: LOMO updates params" in caplog.text


def test_what_others_have_put_into_a_checkpoint_stays(plain):
    run = plain()
    run.train()
    run.save("same").wait(60)
    (run.folder / "same" / "more").mkdir()
    (run.folder / "same" / "more" / "notes").write_text("mine")
    run.train()
    run.save("same").wait(60)
    assert {*files(run.folder)} == {"same/states.pt", "same/more/notes"}


def test_a_busy_saver_skips_or_stops_for_a_small_buffer(plain, disk, caplog):
    run = plain(when_busy="skip", host_buffer=SMALLEST)
    run.train()
    disk.hang()
    save = run.save()
    run.train()
    assert run.save() is None
    assert "step 2: save skipped: the previous save is still being written" in caplog.text
    disk.recover()
    save.wait(60)
    assert run.save() is not None


def test_without_background_a_save_is_complete_at_once(plain, disk):
    run = plain(background=False)
    run.train()
    assert run.save().is_done
    disk.error = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(SaveFailed, match="No space left"):
        run.save()


def test_finished_checkpoints_are_copied_to_a_mirror(plain, monkeypatch, caplog):
    url, faults = "memory://bucket/stock", [OSError("slow down")] * 9
    fs, root = fsspec.core.url_to_fs(url)
    put_file, order = fs.put_file, []

    def put(self, source, target, **more):
        if faults:
            raise faults.pop()
        order.append(target.rpartition("stock/")[2])
        return put_file(source, target, **more)

    monkeypatch.setattr(type(fs), "put_file", put)
    monkeypatch.setattr(remote, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(retrying, "PAUSE_S", (0.01, 0.02))
    run = plain(mirror=url)
    run.train()
    run.save("one").wait(60)
    (run.folder / "latest").write_text("two")
    run.train()
    run.save("two").wait(60)
    run.saver.close()
    assert "failed, retrying" in caplog.text
    assert order == ["one/states.pt", "two/states.pt"]
    for name in ("one", "two"):
        assert fs.cat_file(f"{root}/{name}/states.pt") == (run.folder / name / "states.pt").read_bytes()
        assert not fs.exists(f"{root}/{name}/{remote.UPLOADING}")
    assert fs.cat_file(f"{root}/latest") == b"two"


def test_what_is_deleted_before_it_is_copied_is_left_out(plain, monkeypatch, caplog):
    url = "memory://bucket/gone"
    fs, root = fsspec.core.url_to_fs(url)
    run, is_free = plain(mirror=url), threading.Event()
    copy = stock_mirror.StockMirror._copy
    monkeypatch.setattr(stock_mirror.StockMirror, "_copy", lambda self, one: is_free.wait(60) and copy(self, one))
    run.train()
    run.save("one").wait(60)
    shutil.rmtree(run.folder / "one")
    is_free.set()
    run.saver.close()
    assert "one was not copied to memory://bucket/gone: it was removed" in caplog.text
    assert not fs.exists(f"{root}/one")


def test_the_end_of_a_process_completes_its_save(tmp_path):
    start_ranks("saving.stock_loops", ["ends", tmp_path], 1, tmp_path)
    assert {*files(tmp_path / "run")} == {"step-1/states.pt"}


def test_other_options_are_refused_by_name():
    with pytest.raises(UsageError, match=r"no option 'staging_dir'[\s\S]*no option 'moments'"):
        stock_options({"staging_dir": "/x", "moments": "8bit"})


# --- the Trainer -----------------------------------------------------------------------------------------------------

OFTEN = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2, "per_device_train_batch_size": 2, "layers": 1}
STOCK = {"layout": "stock"}


def test_the_trainers_checkpoints_are_its_own(tmp_path):
    stock = Alone(tmp_path / "stock", **OFTEN, save_total_limit=2).train()
    lazy = Alone(tmp_path / "lazy", STOCK, **OFTEN, save_total_limit=2).train()
    assert stock.losses == lazy.losses and stock.checkpoints == lazy.checkpoints == [4, 6]
    for step in (4, 6):
        check_same(stock.checkpoint(step), lazy.checkpoint(step), ["training_args.bin"])
    assert Alone(tmp_path / "again", **OFTEN).train(lazy.checkpoint(4)).losses == {
        step: loss for step, loss in stock.losses.items() if step > 4
    }


def test_no_checkpoint_is_deleted_before_the_next_one_is_durable(tmp_path, disk):
    run = Alone(tmp_path / "run", {**STOCK, "write_timeout": 60}, **{**OFTEN, "max_steps": 3}, save_total_limit=1)
    run.train()
    assert run.checkpoints == [3]
    disk.hang()
    training = threading.Thread(target=run.train, args=(run.checkpoint(3),))
    run.trainer.args.max_steps = 4
    training.start()
    hidden = tmp_path / "run" / ".checkpoint-4.llmtailor-saving"
    while not hidden.exists():
        time.sleep(0.01)
    assert get_last_checkpoint(run.folder) == str(run.checkpoint(3))
    disk.recover()
    training.join()
    assert run.checkpoints == [4]


def test_the_best_checkpoint_is_loaded_and_kept(tmp_path):
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2, "save_total_limit": 1}
    stock = Alone(tmp_path / "stock", **OFTEN, **best).train()
    lazy = Alone(tmp_path / "lazy", STOCK, **OFTEN, **best).train()
    assert stock.checkpoints == lazy.checkpoints
    state = lazy.trainer.state
    assert state.best_model_checkpoint == str(lazy.checkpoint(state.best_global_step))
    for mine, other in zip(stock.trainer.model.parameters(), lazy.trainer.model.parameters(), strict=True):
        assert torch.equal(mine, other)
    saved = json.loads((lazy.checkpoints and lazy.checkpoint(lazy.checkpoints[-1]) / "trainer_state.json").read_text())
    assert "llmtailor-saving" not in json.dumps(saved)


def test_a_failing_disk_costs_the_trainer_its_newest_checkpoint_only(tmp_path, disk):
    run = Alone(tmp_path / "run", STOCK, **{**OFTEN, "max_steps": 2}, save_total_limit=1).train()
    disk.error = OSError(errno.ENOSPC, "No space left on device")
    run.trainer.args.max_steps = 4
    run.train(run.checkpoint(2))
    assert [path.name for path in run.folder.glob("*checkpoint*")] == ["checkpoint-2"]


@pytest.mark.parametrize(
    ("options", "arguments", "what"),
    [
        ({"policy": "parity"}, {}, "policy is 'parity'"),
        ({"save_steps": 3}, {}, "no option 'save_steps'"),
        ({}, {"push_to_hub": True, "hub_strategy": "every_save"}, "hub_strategy"),
    ],
)
def test_the_trainer_is_refused_by_name(tmp_path, options, arguments, what):
    run = Alone(tmp_path / "run")
    for name, value in arguments.items():
        setattr(run.trainer.args, name, type(getattr(run.trainer.args, name))(value))
    with pytest.raises(UsageError, match=what):
        attach(run.trainer, **STOCK, **options)


@pytest.mark.parametrize("stages", [(0, 2), pytest.param((1, 3), marks=pytest.mark.long)], ids=str)
def test_the_trainer_on_two_ranks(tmp_path, stages):
    """The ranks compare losses after a resume. DeepSpeed's padding and numbers of params differ between trainings."""
    start_ranks("saving.stock_loops", ["trainers", tmp_path, *stages], 2, tmp_path)
    for stage in stages:
        for step in (2, 4):
            stock, lazy = (tmp_path / f"{stage}" / name / f"checkpoint-{step}" for name in ("stock", "lazy"))
            assert files(stock).keys() == files(lazy).keys()
            if not stage:
                check_same(stock, lazy, ["training_args.bin"])


@pytest.mark.parametrize("form", ["trainer", pytest.param("full", marks=pytest.mark.long)])
def test_the_trainer_under_fsdp(tmp_path, form):
    start_ranks("saving.stock_loops", ["sharded", tmp_path, form], 2, tmp_path)
    for step in (2, 4):
        stock, lazy = (tmp_path / name / f"checkpoint-{step}" for name in ("stock", "lazy"))
        assert files(stock).keys() == files(lazy).keys()
        check_same(stock, lazy, ["training_args.bin", ".metadata", *(path.name for path in stock.rglob("*.distcp"))])
        for name in ("pytorch_model_fsdp_0", "optimizer_0") if form == "trainer" else ():
            read = [in_dcp(folder / name) for folder in (stock, lazy)]
            assert read[0].keys() == read[1].keys()
            assert all(torch.equal(one, read[1][key]) for key, one in read[0].items() if isinstance(one, torch.Tensor))


def in_dcp(folder):
    """What torch reads of a checkpoint of torch.distributed.checkpoint."""
    states = {}
    _load_state_dict(
        states, storage_reader=FileSystemReader(folder), planner=_EmptyStateDictLoadPlanner(), no_dist=True
    )
    return dict(flatten_state_dict(states)[0])


# --- accelerate ------------------------------------------------------------------------------------------------------


@pytest.fixture
def accelerator(tmp_path):
    AcceleratorState._reset_state(reset_partial_state=True)
    made = Accelerator(cpu=True, project_dir=tmp_path)
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    made.prepare(model, optimizer, torch.optim.lr_scheduler.LinearLR(optimizer))
    yield made
    AcceleratorState._reset_state(reset_partial_state=True)


def train_with(accelerator, steps):
    [model], [optimizer], [scheduler] = accelerator._models, accelerator._optimizers, accelerator._schedulers
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(2, 64)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    return losses


def test_accelerates_state_is_its_own(tmp_path, accelerator, disk):
    train_with(accelerator, 2)
    Accelerator.save_state(accelerator, str(tmp_path / "stock"))
    saver = attach_accelerator(accelerator)
    disk.hang()
    assert accelerator.save_state(str(tmp_path / "lazy")) == tmp_path / "lazy"
    straight = train_with(accelerator, 3)
    assert not (tmp_path / "lazy").exists()
    disk.recover()
    accelerator.load_state(str(tmp_path / "lazy"))
    check_same(tmp_path / "stock", tmp_path / "lazy")
    assert train_with(accelerator, 3) == straight
    saver.close()


def test_accelerates_numbered_states(tmp_path, accelerator, disk):
    """It takes the folder with the highest number, hidden or not."""
    accelerator.project_configuration.automatic_checkpoint_naming = True
    saver = attach_accelerator(accelerator)
    train_with(accelerator, 1)
    accelerator.save_state()
    saver.finish()
    disk.hang()
    accelerator.save_state()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["checkpoint_0"]
    disk.recover()
    saver.close()
    assert accelerator.save_iteration == 2
    assert {path.name for path in tmp_path.rglob("*checkpoint_*")} == {"checkpoint_0", "checkpoint_1"}


def test_a_limit_of_accelerates_states_is_refused(accelerator):
    accelerator.project_configuration.automatic_checkpoint_naming = True
    accelerator.project_configuration.total_limit = 1
    with pytest.raises(UsageError, match="total_limit"):
        attach_accelerator(accelerator)
