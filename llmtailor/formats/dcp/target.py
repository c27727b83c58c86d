"""Model and optimizer of a composite as values in DCP folders, for `fsdp`, `dcp` and `verl`.


The weights are what an FSDP run trains on. From a ZeRO base they are the fp32 master weights, as nothing else would
keep them: the run should build the model in fp32 (and compute in bf16 by mixed precision). Tied names are stored by
both names, as ``model.state_dict()`` has them.

A loader asks for each option that its own param groups have, so options of torch's AdamW that the base lacks are added
with their defaults. A loader ignores keys that it does not ask for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from llmtailor.checkpoint.index import DCP, CheckpointIndex, DcpKeyLayout
from llmtailor.checkpoint.layout import LinkLayout
from llmtailor.checkpoint.optimizer import ParamGroup, without_names
from llmtailor.checkpoint.placement import Placement
from llmtailor.checkpoint.schema import kinds_by_param, refuse_cuts
from llmtailor.checkpoint.wanted import Wanted
from llmtailor.containers.dcp import KeyPath
from llmtailor.containers.unpickle import Quantized
from llmtailor.errors import MismatchError, Problem, UnsupportedCheckpoint, some
from llmtailor.formats.dcp.builder import FolderBuilder
from llmtailor.formats.dcp.keys import ADAMW, BUFFERS, GROUPS, STATE, TIED, merge_alike
from llmtailor.formats.dcp.links import Links
from llmtailor.formats.torch_states import NO_STATES, is_adam, keeps_nothing, step_node, written_dtype
from llmtailor.frameworks.framework import FRAMEWORKS
from llmtailor.frameworks.read import adapters_of
from llmtailor.frameworks.write import LR_SCHEDULER, first_rates, is_of_scheduler, saved_scheduler, scheduler_tree
from llmtailor.model.roles import BUFFER, KIND_OF_ROLE, State


def check_states(base: CheckpointIndex, groups: Sequence[ParamGroup]) -> None:
    """Raise UnsupportedCheckpoint for a base whose states torch would not load."""
    problems = []
    kinds, scalars = kinds_by_param(base), base.scalars()
    if adapters_of(base):
        what = "it is a PEFT run, whose checkpoints lack the model below the adapter; FSDP saves the whole model"
        problems.append(Problem(base.name, what, "stay with the Trainer or DeepSpeed"))
    lost = [p.name for p in base.params.values() if p.numel and State(p.name, KIND_OF_ROLE[p.role]) not in base.held]
    if lost and not problems:
        what = f"it does not hold the values of {some(lost)} under the model's own names"
        problems.append(Problem(base.name, what, "use a base that was saved with them"))
    lacking: list[str] = []
    for group in groups:  # the optimizer may keep nothing of a whole one
        without = [param for param in group.params if not (kinds.get(param) or scalars.get(param))]
        lacking += without if len(without) < len(group.params) else []
    if lacking:
        what = f"its optimizer has no states of {some(lacking)} yet, and torch loads none of some params only"
        problems.append(Problem(base.name, what, "keep the format of the base, or use a later checkpoint"))
    if not kinds:
        what = "its optimizer keeps no states, and torch loads no such folder" if keeps_nothing(base) else NO_STATES
        problems.append(Problem(base.name, what, "use a later checkpoint as base, or another format"))
    if problems:
        raise UnsupportedCheckpoint(problems)


@dataclass(frozen=True, slots=True)
class DcpTarget:
    """The model and the optimizer of a composite, as values in DCP folders, or in files of their form."""

    base: CheckpointIndex
    wanted: Wanted
    style: DcpKeyLayout
    links: Links | None = None

    @classmethod
    def of(cls, base: CheckpointIndex, wanted: Wanted, framework: str, usual: DcpKeyLayout) -> DcpTarget:
        """Build the target of a format; ``usual`` is the layout for a base that has none of this format.

        Raises UnsupportedCheckpoint or MismatchError for a base that can't be stored in this format.
        """
        check_states(base, wanted.layout.groups)
        is_quantized = any(isinstance(value, Quantized) for one in base.sub_groups for value in one.scalars.values())
        if (framework != DCP or is_quantized) and (problems := refuse_cuts(base, f"--to {framework}")):
            raise MismatchError(problems)
        style = base.dcp if base.dcp and base.form.format == framework else usual
        if style.is_flat and len(merge_alike(wanted.layout.groups)) != len(wanted.layout.groups):
            what = "the checkpoint stores the options of each param, not param groups, so these can't be rebuilt"
            raise MismatchError.at("--groups", what, "leave --groups out")
        links = Links(wanted.linkable, wanted.layout.world_size) if wanted.linkable is not None else None
        return cls(base, wanted, style, links)

    def linked(self) -> list[LinkLayout]:
        """Return the linked files, once all other files are laid out."""
        return self.links.files() if self.links is not None else []

    def weights(self) -> Iterator[tuple[str, str, tuple[int, ...], State, bool]]:
        """Yield name, dtype, shape and state of each tensor of the model, and whether it is cut."""
        base = self.base
        order = {name: at for at, name in enumerate(base.train.model_order)}
        names = sorted((*base.params, *base.tied), key=lambda name: order.get(name, len(order)))
        for name in names:
            param = base.params[base.tied.get(name, name)]
            kind = KIND_OF_ROLE[param.role]
            state = State(param.name, kind)
            held = base.held.get(state)
            dtype = held.live_dtype if held and kind == BUFFER else written_dtype(base, held)
            yield name, dtype, param.shape, state, kind != BUFFER and name not in base.train.unclear

    def _place(self, state: State) -> Placement | None:
        """Return where the base has a state, for an output of as many ranks."""
        held = self.base.held.get(state)
        return held.place if held is not None and self.wanted.layout.world_size == self.base.world_size else None

    def add_model(self, folder: FolderBuilder) -> None:
        for name, dtype, shape, state, is_cut in self.weights():
            folder.add_state(
                (*self.style.model, name), state, dtype, shape, name=name, is_cut=is_cut, like=self._place(state)
            )

    def add_optimizer(self, folder: FolderBuilder) -> None:
        base, layout = self.base, self.wanted.layout
        kinds = kinds_by_param(base)
        steps = {param: one.step for one in layout.sub_groups for param in one.params}
        scalars = {param: one.scalars for one in layout.sub_groups for param in one.params}
        for param in (param for group in layout.groups for param in group.params):
            for kind, held in kinds.get(param, {}).items():
                path, state, dtype = self._path(STATE, param, kind), State(param, kind), written_dtype(base, held)
                is_cut = held.shape == base.params[param].shape
                folder.add_state(path, state, dtype, held.shape, is_cut=is_cut, like=self._place(state))
            for kind, value in scalars[param].items():
                folder.add(self._path(STATE, param, kind), value)
            if (step := steps[param]) is not None:
                folder.add(self._path(STATE, param, "step"), step_node(base, step, param))
        for number, group in enumerate(layout.groups):
            options = self.options(group, number)
            if self.style.is_flat:
                for param in group.params:
                    for key, value in options.items():
                        folder.add(self._path(GROUPS, param, key), value)
                continue
            for key, value in {**options, "params": list(group.params)}.items():
                folder.add((*self.style.optimizer, GROUPS, number, key), value)

    def _path(self, section: str, param: str, last: str) -> KeyPath:
        if self.style.is_flat:
            return (*self.style.optimizer, f"{section}.{param}.{last}")
        return (*self.style.optimizer, section, param, last)

    def options(self, group: ParamGroup, number: int) -> dict[str, Any]:
        """Return the options of a param group, with those that its loader asks for."""
        if self.style.is_flat:
            return without_names(group.hyper)
        if self.base.dcp:
            return dict(group.hyper)
        own = {}
        # torch's loader asks for it if the run that resumes has a scheduler, which adds it to the groups
        if FRAMEWORKS[self.wanted.framework].needs_scheduler or saved_scheduler(self.base) is not None:
            first = first_rates(self.base, self.wanted)[number]
            own["initial_lr"] = group.hyper.get("lr") if first is None else first
        return {**own, **self._defaults(), **group.hyper}

    def _defaults(self) -> dict[str, Any]:
        """Return the options that torch's AdamW has and DeepSpeed's own optimizers don't save; none for others."""
        if not is_adam(self.base):
            return {}
        made = self.base.zero.engine.ds_config.get("optimizer")
        if not isinstance(made, dict) or str(made.get("type")).lower() != "adam":
            return ADAMW
        options = made.get("params")
        return {**ADAMW, "decoupled_weight_decay": not options or options.get("adam_w_mode", True) is not False}

    def add_others(self, folder: FolderBuilder) -> None:
        """Add everything except model and optimizer, such as the scheduler's state."""
        tree = scheduler_tree(self.base, self.wanted.from_group)
        scheduler = (*self.style.root, LR_SCHEDULER)
        for key, entry in self.base.others.items():
            if not is_of_scheduler(self.base, entry) and key not in (".".join(BUFFERS), ".".join(TIED)):
                folder.add_entry(entry)
        if isinstance(tree, dict):
            for name, value in tree.items():
                folder.add_object((*scheduler, str(name)), value)

    def add_roles(self, folder: FolderBuilder) -> None:
        """Add the names of floating-point buffers, and tied names: both look like frozen params to a later reader.

        With the latter, it takes all others for frozen.
        """
        names = [param.name for param in self.base.params.values() if param.role == "buffer" and param.numel]
        if names:
            folder.add(BUFFERS, names)
        has_others = self.base.tied or any(param.role != "trainable" for param in self.base.params.values())
        if has_others and not self.base.train.unclear:
            folder.add(TIED, dict(self.base.tied))

    def notices(self) -> list[Problem]:
        found = []
        if self.base.form.has_masters:
            what = "its weights are written as the fp32 master weights; loss scale, counters and ds_config are left out"
            found.append(Problem(self.base.name, what, "resume with a model in fp32, and mixed precision as before"))
        added = sorted(self._defaults().keys() - {key for group in self.wanted.layout.groups for key in group.hyper})
        if added and not self.base.dcp:
            what = f"its param groups lack options that torch's AdamW asks for: {', '.join(added)}"
            found.append(Problem(self.base.name, what, "no action needed: they get AdamW's defaults"))
        return found
