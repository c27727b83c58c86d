"""The trainings that the tests stand on."""

from __future__ import annotations

from clients.spec import Spec

TWO_RANKS = {
    spec.name: spec
    for spec in (
        Spec("engine-1", stage=1, scheduler="", tag="1"),
        Spec("engine-2", stage=2, scheduler="deepspeed", tag="checkpoint"),
        Spec("engine-3", stage=3, steps=6),
        Spec("accelerate-2", "accelerate", stage=2, objects=True),
        Spec("accelerate-3", "accelerate", stage=3, scheduler=""),
        Spec("accelerate-ddp", "accelerate", stage=0, dtype="fp32", objects=True),
        Spec("accelerate-fsdp", "accelerate", stage=0, fsdp=True, dtype="fp32"),
        Spec("accelerate-fsdp-named", "accelerate", stage=0, fsdp=True, dtype="fp32", named=True),
        Spec("accelerate-named", "accelerate", stage=0, dtype="fp32", scheduler="", named=True),
    )
}
SAVERS = {
    spec.name: spec
    for spec in (
        Spec("engine-saver", stage=2, scheduler="", saver="full"),
        Spec("accelerate-2-saver", "accelerate", stage=2, objects=True, saver="full"),
        Spec("accelerate-3-saver", "accelerate", stage=3, scheduler="", objects=True, saver="full"),
        Spec("accelerate-ddp-saver", "accelerate", 0, dtype="fp32", named=True, objects=True, saver="full"),
        Spec(
            *("accelerate-fsdp-saver", "accelerate", 0),
            fsdp=True,
            dtype="fp32",
            named=True,
            objects=True,
            saver="full",
        ),
    )
}
ALL = {**TWO_RANKS, **SAVERS}
