"""The options of the commands, each defined once, and what those that choose a run's checkpoints mean."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from llmtailor.errors import RecipeError, TargetError, UsageError
from llmtailor.model.precision import MASTERS, MOMENTS

if TYPE_CHECKING:
    from llmtailor.checkpoint.optimizer import Mesh
    from llmtailor.compose.plan import OpenedSources
    from llmtailor.recipe import Recipe
    from llmtailor.runs.scan import Index

Command = TypeVar("Command", bound=Callable[..., Any])
STAGES = {"keep": None, "1": 1, "2": 2, "3": 3, "none": 0}
_MAX_BYTES = 16 << 20


class _Path(click.Path):
    """A path; ``DIR@TAG`` names a tag folder of DeepSpeed's. With ``urls``, also a folder in an object store."""

    def __init__(self, urls: bool = False) -> None:
        super().__init__(path_type=Path)
        self.urls = urls

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and "://" in value:
            if not self.urls:
                self.fail(f"{value!r} is a URL; a local path is needed", param, ctx)
            from llmtailor.storage.remote import open_location

            return open_location(value)
        path = Path(str(super().convert(value, param, ctx)))
        if "@" not in path.name:
            return path
        from llmtailor.storage.local import with_tag

        return with_tag(path)


class _Registered(click.Choice[str]):
    """A choice of the names in a registry, which is imported when they are needed."""

    def __init__(self, names: Callable[[], Iterable[str]]) -> None:
        super().__init__(())
        del self.choices  # click's own would hide the property
        self._names = names

    @cached_property
    def choices(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(self._names())


def _formats() -> Iterable[str]:
    from llmtailor.formats.registry import WRITERS

    return WRITERS


def _frameworks() -> Iterable[str]:
    from llmtailor.checkpoint.index import DCP, MEGATRON, VERL
    from llmtailor.frameworks.framework import FRAMEWORKS

    return (name for name in FRAMEWORKS if name not in (DCP, MEGATRON, VERL))  # which have a format each


def _groups() -> Iterable[str]:
    from llmtailor.checkpoint.layout import CHOICES

    return CHOICES


def _strategies() -> Iterable[str]:
    from llmtailor.recipe.strategies import STRATEGIES

    return STRATEGIES


class MeshType(click.ParamType[Any]):
    """A number of ranks by kind of parallelism; ``axes`` are the fields of `Mesh` that may be given."""

    name = "mesh"

    def __init__(self, *axes: str) -> None:
        self.axes = axes

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Mesh:
        from llmtailor.checkpoint.optimizer import Mesh

        sizes: dict[str, int] = {}
        for word in f"{value}".split(","):
            axis, _, size = word.strip().partition("=")
            if axis not in self.axes or axis in sizes or not re.fullmatch("[1-9][0-9]{0,5}", size):
                form = ",".join(f"{axis}={at}" for at, axis in enumerate(self.axes, 2))
                self.fail(f"{value!r} is not of the form {form}", param, ctx)
            sizes[axis] = int(size)
        return Mesh(**sizes)


PATH, LOCATION = _Path(), _Path(urls=True)
COUNT = click.IntRange(min=1)
STEP = click.IntRange(min=0)

RUN_DIR = click.argument("run", type=PATH, metavar="RUN_DIR")
RUN = click.argument("run", type=LOCATION, metavar="RUN_DIR")
AT = click.option("--at", type=STEP, metavar="STEP", help="Ignore checkpoints later than this step.")
DRY_RUN = click.option("--dry-run", is_flag=True, help="Show the plan and check the disk space; write nothing.")
FORCE = click.option("--force", is_flag=True, help="Replace OUT once the new one is complete.")
JSON = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on stdout.")
QUIET = click.option("--quiet", "-q", is_flag=True, help="Print only problems, notes and the final line.")
YES = click.option("--yes", is_flag=True, help="Make the changes. Default: only show them.")
TRUST_UNRECORDED = click.option(
    "--trust-unrecorded",
    is_flag=True,
    help="Also use full checkpoints that don't record which attempt wrote them.",
)
FOR = click.option(
    "--for",
    "framework",
    type=_Registered(_frameworks),
    help="Framework that will resume from it: the Trainer, accelerate's load_state, Lightning, or a DeepSpeed engine "
    "in your own loop. Default: detected from the files.",
)
CLONE = click.option(
    "--clone",
    type=click.Choice(["auto", "never", "require"]),
    default="auto",
    show_default=True,
    help="Share disk blocks with the sources (reflinks on XFS, Btrfs). auto: if the file system supports it. never: "
    "write every byte. require: fail if blocks can't be shared.",
)


def _rounded(flag: str, choices: Sequence[str], what: str) -> Callable[[Command], Command]:
    about = f"Precision of {what} in partial checkpoints, as for attach; see docs/saving.md. Default: the policy's."
    return click.option(flag, type=click.Choice(choices), help=about)


MASTERS_AS = _rounded("--masters", MASTERS, "fp32 master weights")
MOMENTS_AS = _rounded("--moments", MOMENTS, "Adam's fp32 moments")
DISTRIBUTED = click.option(
    "--distributed",
    is_flag=True,
    help="Split the work over the ranks that torchrun has started; see docs/compose.md.",
)
_CHOOSING = [
    click.option(
        "--at",
        type=STEP,
        metavar="STEP",
        help="Ignore checkpoints later than this step. Default: the step of the newest usable checkpoint.",
    ),
    click.option(
        "--strategy",
        type=_Registered(_strategies),
        help="latest: each part from the newest checkpoint that holds it (default). parity: odd layers from the "
        "previous one. filter: first, last and auxiliary parts from the newest, others from the newest of every k-th. "
        "Only steps with a usable full or partial checkpoint count.",
    ),
    click.option("--flip", is_flag=True, help="parity: even layers from the previous one."),
    click.option("--first", type=STEP, metavar="N", help="filter: first N layers (default 2)."),
    click.option("--last", type=STEP, metavar="M", help="filter: last M layers (default 2)."),
    click.option("--aux", multiple=True, metavar="PART", help="filter: auxiliary parts from the newest (default all)."),
    click.option("--every", type=COUNT, metavar="K", help="filter: every K-th step, from the oldest (default 5)."),
    click.option("--from-flags", type=PATH, metavar="FILE", help="LLMTailor's update log, JSON lines."),
    click.option("--base", type=PATH, metavar="CKPT", help="--from-flags: source of the parts that no line flags."),
    click.option("--total-layers", type=COUNT, metavar="L", help="--from-flags: check the number of layers."),
    click.option(
        "--also",
        type=PATH,
        multiple=True,
        metavar="DIR",
        help="Also use the partial checkpoints in this staging folder of the run. Repeatable.",
    ),
    TRUST_UNRECORDED,
]
_TARGET = [
    click.option(
        "--num-gpu",
        "world_size",
        type=COUNT,
        metavar="N",
        help="Number of ranks (GPUs) of the output. Default: the base's.",
    ),
    click.option(
        "--mesh",
        type=MeshType("tp", "dp"),
        metavar="tp=N,dp=M",
        help="The same for AutoTP: tp ranks share a model, and dp ranks its states. tp=1: without tensor parallelism. "
        "Default: the base's tp for DeepSpeed's shards, 1 for other formats.",
    ),
    click.option(
        "--to",
        type=_Registered(_formats),
        help="Output format. deepspeed, fsdp, trainer (without either): for the Trainer. universal: DeepSpeed's format "
        "for any ZeRO stage. dcp: a torch.distributed.checkpoint folder, for your own loop. verl: for verl with FSDP2. "
        "megatron: Megatron-core's torch_dist. Default: the base's, or as --stage implies.",
    ),
    click.option(
        "--stage",
        type=click.Choice([*STAGES]),
        default="keep",
        show_default=True,
        help="ZeRO stage of the output; none: the Trainer's format without DeepSpeed.",
    ),
    click.option(
        "--layout",
        type=_Registered(_frameworks),
        help="Write the files of this framework: the Trainer, accelerate's load_state, Lightning (only from its own "
        "checkpoints), or engine.load_checkpoint in your own loop. Default: the base's, or the Trainer's with "
        "--to trainer.",
    ),
    click.option(
        "--groups",
        type=_Registered(_groups),
        default="keep",
        show_default=True,
        help="Param groups of the output. layer: two per layer and one per other part. default: the Trainer's two. "
        "one: all params in one group, as in verl.",
    ),
    click.option(
        "--step",
        type=click.Choice(["base", "rebase", "source"]),
        help="Adam's step for a group with parts of several steps. base: the base's; moments unchanged. rebase: the "
        "base's; moments scaled to keep their bias-corrected values. source: refuse. Default: base, and for merge "
        "--run rebase if the first update would be off by 1 % otherwise.",
    ),
    FORCE,
    click.option(
        "--allow-errors",
        is_flag=True,
        help="Publish OUT although `verify` calls it not resumable, because of errors in its sources.",
    ),
    click.option("--restart", is_flag=True, help="Discard any unfinished merge in OUT and start over."),
    click.option(
        "--checksum",
        is_flag=True,
        help="Store XXH3 digests of OUT's files and of the source files, which are read again to check the copied data "
        "and the checksums recorded in the sources.",
    ),
    click.option(
        "--copy-tokenizer/--no-copy-tokenizer", default=True, show_default=True, help="Include tokenizer files in OUT."
    ),
    click.option(
        "--reference",
        is_flag=True,
        help="Copy no states: OUT holds data files of the sources as hard links. For FSDP and DCP outputs of such "
        "sources.",
    ),
    CLONE,
    DISTRIBUTED,
    DRY_RUN,
    JSON,
    QUIET,
]
_OF_STRATEGY = ("flip", "first", "last", "aux", "every", "strategy")
_OF_FLAGS = ("base", "total_layers")
CHOOSING = {"at", "also", "from_flags", "trust_unrecorded", *_OF_STRATEGY, *_OF_FLAGS}


def _all_of(options: list[Callable[[Command], Command]]) -> Callable[[Command], Command]:
    return lambda command: reduce(lambda to, option: option(to), reversed(options), command)


choosing_options = _all_of(_CHOOSING)
"""Adds the options that choose a run's checkpoints, which `choose` takes"""
target_options = _all_of(_TARGET)
"""Adds the options of the output"""


def check_output(file: Path, force: bool) -> None:
    """Raise TargetError if a file exists and may not be replaced, or if its folder does not exist."""
    if file.exists() and not force:
        raise TargetError.at(file, "the file already exists", "choose another one, or use --force")
    if not file.absolute().parent.is_dir():
        raise TargetError.at(file, "there is no such folder", "create the folder, or choose another path")


def given(options: dict[str, Any]) -> list[str]:
    """Return the flags of the options that were given."""
    names = [name for name, value in options.items() if value not in (None, False, ())]
    return ["--" + name.replace("_", "-") for name in names]


def choose(
    run: Path, options: dict[str, Any], folder: Path | None = None, index: Index | None = None
) -> tuple[Recipe, OpenedSources]:
    """Return the recipe that the options choose, see `runs.choose.choose_for_run`; reads the files they name.

    Raises UsageError for options that can't be combined and RecipeError for unreadable files.
    """
    from llmtailor.formats.registry import index_checkpoint
    from llmtailor.recipe.strategies import StrategyOptions
    from llmtailor.runs.choose import UpdateLog, choose_for_run

    how: StrategyOptions | UpdateLog
    log = options["from_flags"]
    if unexpected := given({name: options[name] for name in (_OF_STRATEGY if log else _OF_FLAGS)}):
        what = "can't be combined with --from-flags" if log else "needs --from-flags"
        raise UsageError.at(unexpected[0], f"{', '.join(unexpected) if log else unexpected[0]} {what}", "omit it")
    if log:
        how = UpdateLog(_read(log), str(log), options["base"], options["total_layers"])
    else:
        numbers = {name: options[name] for name in ("first", "last", "every") if options[name] is not None}
        strategy = options["strategy"] or "latest"
        how = StrategyOptions(strategy, flip=options["flip"], aux=tuple(options["aux"]), **numbers)
    also, trust_unrecorded = options["also"], options["trust_unrecorded"]
    read = index or index_checkpoint
    return choose_for_run(run, options["at"], how, folder, also=also, trust_unrecorded=trust_unrecorded, index=read)


def _read(path: Path) -> str:
    """Return the text of a file, which may be a pipe: ``--from-flags <(jq ...)``. Raises RecipeError."""
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        text = data.decode("utf-8")
    except (OSError, ValueError) as error:
        raise RecipeError.at(path, f"the file can't be read ({error})", "check the path") from error
    if len(data) > _MAX_BYTES:
        raise RecipeError.at(path, f"the file is larger than {_MAX_BYTES >> 20} MiB", "check the path")
    return text
