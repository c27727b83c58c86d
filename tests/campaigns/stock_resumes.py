"""Resume damaged checkpoints with the stock Trainer, and compare with what the tables of fields say that it does.

    python tests/campaigns/stock_resumes.py OUT [--only WORD]

Every row of the field tables about files without DeepSpeed, in every way that it speaks of, is made in a checkpoint of
a tiny model, which one CPU process then resumes; a second or two each. The losses, learning rates, logs and saves that
follow are compared with those of the run that went on. Printed is what stock did for every damage, with a mark where a
row that is an error did no harm, or a row that is none did.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import io
import json
import logging
import os
import shutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402
from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator, set_seed  # noqa: E402

from helpers.fields import damages_of, places_of  # noqa: E402
from llmtailor.findings import ERROR  # noqa: E402
from llmtailor.formats.field_tables import UNLIKE  # noqa: E402
from llmtailor.formats.plain.optimizer import OPTIMIZER_TABLE  # noqa: E402
from llmtailor.formats.rng import RNG_TABLE  # noqa: E402
from llmtailor.formats.scheduler import SCHEDULER_TABLE  # noqa: E402
from llmtailor.formats.trainer_checks import CONFIG_TABLE, SCALER_TABLE, TRAINER_STATE_TABLE  # noqa: E402
from plain.training import DECAY, RATE, Tokens  # noqa: E402
from real.models import build  # noqa: E402

STEP, LAST = 4, 8
FILES = {
    "trainer_state.json": "trainer_state.json",
    "scheduler.pt": "scheduler.pt",
    "rng_state.pth, rng_state_N.pth": "rng_state.pth",
    "config.json (without DeepSpeed)": "config.json",
    "optimizer.pt (without DeepSpeed)": "optimizer.pt",
}
"""The file of a table, by its title; a loss scale takes a GPU"""
SAME = "resumes"


class Rows(TrainerCallback):
    """Keeps what is logged at each step."""

    def __init__(self) -> None:
        self.rows: list[Any] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs:
            self.rows.append([state.global_step, logs["loss"], logs["learning_rate"], logs["epoch"]])


def train(folder: Path, resume_from: Path | None) -> dict[str, Any]:
    """Train, or resume, up to the last step, with dropout; return what can be compared."""
    args = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        max_steps=LAST,
        save_strategy="steps",
        save_steps=2,
        logging_steps=1,
        per_device_train_batch_size=2,
        learning_rate=RATE,
        weight_decay=DECAY,
        lr_scheduler_type="linear",
        seed=0,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    set_seed(0)
    model = build("llama", 2, False)
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.1
    rows = Rows()
    trainer = Trainer(
        model=model, args=args, train_dataset=Tokens(64), data_collator=default_data_collator, callbacks=[rows]
    )
    trainer.train(resume_from_checkpoint=str(resume_from) if resume_from else None)
    return {
        "rows": [row for row in rows.rows if row[0] > STEP],
        "weights": {name: float(param.detach().double().sum()) for name, param in model.named_parameters()},
        "saved": sorted(path.name for path in folder.glob("checkpoint-*") if int(path.name[11:]) > STEP),
        "entries": len(trainer.state.log_history),
    }


def in_a_child(call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Call in a fork of this process, which has imported all there is to import: a damage may kill it."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            try:
                result = call()
            except Exception as error:
                place = traceback.extract_tb(error.__traceback__)[-1]
                result = {"fails": f"{type(error).__name__} in {Path(place.filename).name}: {str(error)[:80]!r}"}
        os.write(writer, json.dumps(result).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        told = pipe.read()
    status = os.waitpid(child, 0)[1]
    return dict(json.loads(told)) if told else {"fails": f"the process died ({status})"}


def compare(got: dict[str, Any], wanted: dict[str, Any]) -> str:
    if "fails" in got:
        return f"fails: {got['fails']}"
    differing = [key for key in wanted if got[key] != wanted[key]]
    return f"silent: other {', '.join(differing)}" if differing else SAME


def load(path: Path) -> Any:
    return json.loads(path.read_text()) if path.suffix == ".json" else torch.load(path, weights_only=False)


def save(tree: Any, path: Path) -> None:
    if path.suffix == ".json":
        path.write_text(json.dumps(tree))
    else:
        torch.save(tree, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=inspect.cleandoc(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, help="a folder for the trainings")
    parser.add_argument("--only", default="", help="of rows whose file and name hold this word")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)  # a fork has no other threads
    shutil.rmtree(options.out / "whole", ignore_errors=True)
    wanted = in_a_child(lambda: train(options.out / "whole", None))
    source = options.out / "whole" / f"checkpoint-{STEP}"
    counts: dict[str, int] = {}
    for table in (TRAINER_STATE_TABLE, SCHEDULER_TABLE, RNG_TABLE, SCALER_TABLE, CONFIG_TABLE, OPTIMIZER_TABLE):
        path = FILES.get(table.title)
        for field in table.fields if path else ():
            for damage in damages_of(field):
                tree = load(source / str(path))
                name = f"{path} {damage}"
                if damage.way == UNLIKE or options.only not in name or not [*places_of(tree, field.path)]:
                    continue
                work = options.out / "work"
                shutil.rmtree(work, ignore_errors=True)
                shutil.copytree(source, work / source.name)
                damage.apply(tree)
                save(tree, work / source.name / str(path))
                stock = compare(in_a_child(lambda work=work: train(work, work / source.name)), wanted)  # type: ignore[misc]
                is_error = damage.says is not None and damage.says.severity == ERROR
                mark = " " if is_error == (stock != SAME) else "!"
                counts[mark] = counts.get(mark, 0) + 1
                print(f"{mark} {name} | {damage.says.severity if damage.says else '-'} | {stock}", flush=True)
    print(f"{sum(counts.values())} damages, {counts.get('!', 0)} marked")


if __name__ == "__main__":
    main()
