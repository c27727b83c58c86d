"""Lightning's one file: reader and layout.

A composite is a folder with this file, a manifest, and the files beside its base. The file does not state everything:
the ids in the optimizer's groups count the params in the order of ``state_dict``, which is the module's; tensors that
share their bytes are tied; tensors of integers and the running statistics of batch norms are buffers. There are no
separate master weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmtailor.checkpoint.index import LIGHTNING, TensorEntry
from llmtailor.codes import Code
from llmtailor.containers.json import FileTrees, check_name, get, get_count, read_tensor
from llmtailor.containers.unpickle import as_tensor
from llmtailor.errors import PathIn, Problems, attempt
from llmtailor.findings import ERROR, Finding
from llmtailor.formats import lightning_tree as lightning
from llmtailor.formats.format import Draft
from llmtailor.formats.lightning_tree import SCHEDULERS
from llmtailor.formats.param_names import ModelFacts
from llmtailor.formats.torch_optimizer import parse_optimizer, read_tree
from llmtailor.formats.torch_states import check_steps, index_with_weights
from llmtailor.frameworks.files import CKPT
from llmtailor.frameworks.framework import FRAMEWORKS
from llmtailor.frameworks.read import TrainerFiles, file_fact, read_trainer_files
from llmtailor.frameworks.scheduler import check_scheduler, compare_scheduler, read_scheduler
from llmtailor.model.dtypes import FLOATING
from llmtailor.model.roles import WEIGHT, State

_SUFFIX = ".ckpt"
_COUNTER = "num_batches_tracked"
_OF_BATCH_NORM = ("running_mean", "running_var")


def detects(root: Path) -> bool:
    """Return whether this is a file that Lightning would save, or the folder of a composite with one."""
    return (root.suffix == _SUFFIX and root.is_file()) or (root / CKPT).is_file()


def read(root: Path, name: str, framework: str | None = None) -> Draft:
    """Read a checkpoint; see `Reader`."""
    problems, trees = Problems(), FileTrees(root)
    if root.is_file():
        fact, where = file_fact(root), PathIn(name, ".")
        trainer = TrainerFiles(FRAMEWORKS[LIGHTNING], {where.path: fact} if fact is not None else {})
        tree = attempt(lambda: read_tree(trees, where), problems)
    else:
        trainer, where = read_trainer_files(trees, name, problems, LIGHTNING), PathIn(name, CKPT)
        tree = trainer.trees.get(CKPT)
    if framework not in (None, LIGHTNING):
        what = f"the file is Lightning's, and {FRAMEWORKS[framework].title} does not read it"
        finding = Finding(where, what, "resume with Lightning", Code.FILE_NAME, ERROR)
        trainer = replace(trainer, findings=(*trainer.findings, finding))
    draft = attempt(lambda: _draft(root, where, tree, trainer, problems), problems) if tree is not None else None
    return draft or Draft(problems)


def _draft(root: Path, where: PathIn, tree: Any, trainer: TrainerFiles, problems: Problems) -> Draft:
    saved = parse_optimizer(root, lightning.read_optimizer_tree(tree, where), where)
    step = attempt(lambda: get_count(tree, "global_step", where), problems)
    schedulers = attempt(lambda: get(tree, SCHEDULERS, list, where), problems) or []
    weights, tied = _weights(lightning.read_names(tree, where), where)
    model = _facts(weights, tied)
    trainer = replace(trainer, global_step=step, trees={**trainer.trees, CKPT: lightning.without_states(tree)})
    index, known = index_with_weights(root, where, saved, weights, model, trainer, buffers=model.buffers)
    hyper = [group.hyper for group in saved.groups]
    findings = [*saved.findings, *lightning.check_loops(tree, where)]
    for one in schedulers:
        findings += [*check_scheduler(one, where), *compare_scheduler(read_scheduler(one), where, hyper, None)]
    copies = {State(param, WEIGHT): weights[known.tied.get(param, param)] for param in (*weights, *known.tied)}
    index = replace(
        index,
        held={**index.held, **copies},
        findings=(*findings, *index.findings),
        train=replace(index.train, model_order=tuple(model.params)),
    )
    if lightning.SCALED in tree:  # a step whose gradients overflow counts, but Adam makes none
        return Draft(problems, index, trainer)
    return Draft(problems, index, trainer, lambda index: check_steps(index, trainer))


def _weights(state_dict: Mapping[Any, Any], where: PathIn) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Return the tensors of ``state_dict`` by name, and each tied name with the name that its values are under."""
    weights: dict[str, TensorEntry] = {}
    tied: dict[str, str] = {}
    first: dict[object, str] = {}
    for key, node in state_dict.items():
        if as_tensor(node) is None:  # what a module has added with get_extra_state
            continue
        name = check_name(key, "state_dict", where)
        one = read_tensor(node, f"state_dict[{name}]", where)
        stored = first.setdefault(one.extent, name) if one.numel else name
        if stored != name:
            tied[name] = stored
        else:
            weights[name] = one.entry
    return weights, tied


def _facts(weights: Mapping[str, TensorEntry], tied: Mapping[str, str]) -> ModelFacts:
    norms = {name.removesuffix(_COUNTER) for name in weights if name.endswith(_COUNTER)}
    of_norms = {f"{norm}{kind}" for norm in norms for kind in _OF_BATCH_NORM}
    buffers = {name for name, held in weights.items() if held.dtype not in FLOATING or name in of_norms}
    params = {name: held.shape for name, held in weights.items() if name not in buffers}
    # norms and biases, which are decayed in no recipe for two groups, are vectors
    matrices = frozenset(name for name, shape in params.items() if len(shape) > 1)
    return ModelFacts(params, matrices, tied, frozenset(buffers))
