"""The FSDP trainings that the tests stand on, one set of ranks for each world size."""

from __future__ import annotations

from dcp.spec import Spec

FROZEN = ("*embed_tokens*", "*.layers.1.*")

TWO_RANKS = {
    spec.name: spec
    for spec in (
        Spec("trainer"),
        Spec("loop", "loop"),
        Spec("full", "full"),
        Spec("fsdp1", "fsdp1"),
        Spec("columns", "columns"),
        Spec("titan", "titan"),
        Spec("hf", "hf"),
        Spec("ddp", "ddp"),
        Spec("loop-tied", "loop", tied=True),
        Spec("trainer-tied", tied=True),
        Spec("loop-frozen", "loop", frozen=FROZEN),
        Spec("titan-bf16", "titan", dtype="bfloat16"),
    )
}
THREE_RANKS = {spec.name: spec for spec in (Spec("loop-w3", "loop", per_device_batch=2),)}
