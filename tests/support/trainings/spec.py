"""What one training is: pure data, sent to the training processes as JSON. Each program has a kind of its own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import KW_ONLY, asdict, dataclass, replace
from typing import Any, ClassVar, TypeVar

Kind = TypeVar("Kind", bound="Training")
DEEPSPEEDS_MUON = "ds_muon"
"""Of a `Loop`: the optimizer of the DeepSpeed config, Muon for the matrices in layers and Adam for the rest"""
NEWEST = "newest"
"""Of Lightning: what `newest_checkpoint` composes of the run's own saves, in the ranks that resume"""


@dataclass(frozen=True)
class Training:
    """What all programs share. Checkpoints are saved in a folder with the training's name."""

    program: ClassVar[str]
    """The module in this folder that trains"""
    name: str
    _: KW_ONLY
    ranks: int = 2
    layers: int = 3
    tied: bool = False
    dtype: str = "fp32"
    """``bf16``, ``fp16`` or ``fp32``"""
    frozen: tuple[str, ...] = ()
    """Globs over param names"""
    per_device_batch: int = 3
    """A resume on other ranks is comparable if the batch of all ranks stays the same."""
    steps: int = 4
    save_steps: int = 2
    seed: int = 0
    resume_from: str | None = None
    """A checkpoint; a relative path starts from the folder of all runs."""
    saver: str = ""
    """The policy of llmtailor's saver, which then saves instead of the program; empty without it"""
    dies_at: int = 0
    """The step after which every rank is killed; 0 for none"""

    def resumed(self: Kind, checkpoint: object, name: str, **changes: Any) -> Kind:
        """The same training, continued from a checkpoint."""
        return replace(self, name=name, resume_from=str(checkpoint), **changes)

    @property
    def folders(self) -> str:
        """How a checkpoint of a step is named: a glob"""
        return "checkpoint-{}"

    @property
    def has_saver(self) -> bool:
        """Whether llmtailor itself saves, so that what is saved may change with it"""
        return bool(self.saver)

    def to_json(self) -> dict[str, Any]:
        return {"class": type(self).__name__, **asdict(self)}


@dataclass(frozen=True)
class Spec(Training):
    """The stock Trainer, with DeepSpeed unless ``stage`` is 0."""

    program = "trainer"
    arch: str = "llama"
    """``+lora`` behind it: PEFT trains an adapter, and the head whole; ``+policy``: one of that name; ``+loras``: that
    one, beside the frozen ``reference``."""
    _: KW_ONLY
    dtype: str = "bf16"
    optimizer: str = "hf"
    """``hf``: the Trainer's AdamW. ``ds_adamw``: torch's AdamW from the DeepSpeed config, one group.
    ``cpu_adam``: DeepSpeedCPUAdam with offloaded states, one group."""
    scheduler: str = "hf"
    """``hf``: linear decay. ``ds``: WarmupDecayLR from the DeepSpeed config."""
    groups: str = "default"
    """``layer``: LLMTailor's 2L+x groups. ``mixin``: the same by `LayerGroupsMixin`, for a model
    that is loaded, which ZeRO-3 partitions at once."""
    stage: int = 3
    """Of ZeRO; 0: the Trainer without DeepSpeed"""
    round_robin: bool = False
    """``round_robin_gradients``, ZeRO-2 only"""
    parameter_alignment: bool = False
    grad_accum_dtype: str | None = None
    """``fp32`` with bf16 and ZeRO-1 makes DeepSpeed use BF16_Optimizer."""
    elastic: bool = False
    """``elastic_checkpoint``, ZeRO-1 and ZeRO-2 only. Stock can't resume from these."""
    offload: bool = False
    """Optimizer states in CPU memory (``offload_optimizer``)"""
    sub_group_size: int | None = None
    clipping: bool = True
    """``gradient_clipping`` is in the config; without it, DeepSpeed clips at its own default."""
    gather: bool = True
    """Without it, ZeRO-3 writes no model.safetensors."""
    load_universal: bool = False
    """Resume with DeepSpeed's own loader of universal checkpoints."""
    max_shard_size: int | None = None
    """Bytes per safetensors shard"""
    tokenizer: bool = False
    """Checkpoints hold tokenizer files."""
    extras: bool = False
    """Each MLP gets a one-element param and buffers that change with every step."""
    dropout: float = 0.0
    """Random numbers matter, and differ between the ranks."""
    per_device_batch: int = 2
    steps: int = 6
    echo: bool = False
    """Write down what DeepSpeed holds before the first step."""

    def resumed(self, checkpoint: object, name: str, **changes: Any) -> Spec:
        """The same training, continued from a checkpoint; DeepSpeed says what it has loaded."""
        return super().resumed(checkpoint, name, **{"echo": self.stage > 0, **changes})


@dataclass(frozen=True)
class Job(Spec):
    """The Trainer with the saver attached, alone or continuing what another has saved. Steps count from 1."""

    program = "attached"
    _: KW_ONLY
    policy: Any = "parity"
    """None: the saver is not attached."""
    every: int | None = 2
    """``save_steps`` of `attach`"""
    options: dict[str, Any] | None = None
    """More arguments of `attach`"""
    arguments: dict[str, Any] | None = None
    """More TrainingArguments, or others than usual"""
    truth: bool = True
    """Let the Trainer save a checkpoint of its own at every save; see `attached`."""
    goes_on: str | None = None
    """Another job, whose partial checkpoints this one finds in its folder: a name, or the path of its folder"""
    at: int | None = None
    """The step at which to continue: `merge --run` composes it before the training starts."""
    disturb: dict[str, Any] | None = None
    """See `attached.Disturbance`."""
    has_saver = True


@dataclass(frozen=True)
class Fsdp(Training):
    """A training under FSDP, each kind saved by its framework's own functions."""

    program = "fsdp"
    kind: str = "trainer"
    """``trainer``: the Trainer with FSDP2, through accelerate. ``full``: the same, with FULL_STATE_DICT. ``ddp``: the
    Trainer with neither FSDP nor DeepSpeed.
    ``fsdp1``: a loop with FSDP1 that saves by accelerate's functions. ``loop``: a loop that saves ``{model, optim}``.
    ``columns``: the same, but matrices are saved as tensor parallelism cuts them. ``titan``: a loop that saves as
    torchtitan does, flat, with its own counters. ``hf``: a loop that saves with `transformers.distributed`, weights in
    safetensors. ``ranks``: one that saves with accelerate's functions, a file for each rank. ``verl``: one that saves
    as verl does."""
    replicas: int = 1
    """How often a mesh with two dimensions repeats the model (HSDP)"""
    extras: bool = False
    """Each MLP gets a one-element param and buffers that change with every step."""

    @property
    def folders(self) -> str:
        return {"titan": "step-{}", "verl": "global_step_{}/actor"}.get(self.kind, "checkpoint-{}")


@dataclass(frozen=True)
class Loop(Training):
    """A loop without a Trainer."""

    program = "loops"
    client: str = "deepspeed"
    """``deepspeed``: a loop that calls ``engine.save_checkpoint``. ``accelerate``: one that calls ``save_state``."""
    _: KW_ONLY
    dtype: str = "bf16"
    stage: int = 3
    """Of ZeRO; 0 without DeepSpeed"""
    fsdp: bool = False
    """Whether accelerate shards the model with FSDP2"""
    scheduler: str = "torch"
    """``torch``: a LambdaLR. ``deepspeed``: WarmupLR of the DeepSpeed config. Empty: none."""
    tag: str = ""
    """Of every save; empty for DeepSpeed's own, ``global_stepN``"""
    named: bool = False
    """Whether the optimizer gets ``named_parameters()``"""
    objects: bool = False
    """Whether an object is registered with accelerate for its checkpoints"""
    offload: bool = False
    """Optimizer states in CPU memory (``offload_optimizer``)"""
    optimizer: str = ""
    """One of `optimizers.IN_LOOPS`, or `DEEPSPEEDS_MUON`; empty: AdamW"""
    tp: int = 1
    """Ranks that share a model by DeepSpeed's AutoTP, the vocabulary too if it is ``tied``"""
    load_universal: bool = False
    """Resume with DeepSpeed's own loader of universal checkpoints."""
    arch: str = "llama"


@dataclass(frozen=True)
class Lightning(Training):
    """Lightning's Trainer. An epoch has two steps, and Lightning saves at the end of each; the saver at each step."""

    program = "lightning"
    stage: int = 0
    """Of ZeRO; 0 for DDP"""
    groups: int = 1
    """Param groups: one, or one for matrices and one without decay for vectors"""
    norm: bool = False
    """Whether the module also has a batch norm, an unused head and a frozen param"""
    optimizer: str = ""
    """One of `trainings.optimizers.IN_LOOPS`, in place of AdamW"""
    fault: str = ""
    """What of a loaded checkpoint is spoiled: ``schedule``, ``moments`` or ``weights``; without one, a resume that
    does not hold its checkpoint stops"""

    @property
    def folders(self) -> str:
        return "epoch=*-step={}.ckpt"


KINDS = {kind.__name__: kind for kind in (Spec, Job, Fsdp, Loop, Lightning)}


def from_json(data: dict[str, Any]) -> Any:
    return KINDS[data["class"]](**{key: value for key, value in data.items() if key != "class"})


def by_name(specs: Iterable[Kind]) -> dict[str, Kind]:
    specs = list(specs)
    named = {spec.name: spec for spec in specs}
    if len(named) != len(specs):
        raise ValueError("two runs have the same name")
    return named
