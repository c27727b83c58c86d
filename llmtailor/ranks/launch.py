"""Which of several processes this one is, from the variables that launchers set. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llmtailor.errors import UsageError

_LAUNCHERS = (
    ("torchrun", "RANK", ("WORLD_SIZE",), ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")),
    ("srun", "SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), ("SLURM_JOB_ID", "SLURM_STEP_ID")),
    ("mpirun", "OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",), ("PMIX_NAMESPACE",)),
    ("mpiexec", "PMI_RANK", ("PMI_SIZE",), ("PMI_ID",)),
)
"""Name, variable of the rank, variables of the number of ranks, and those that tell one launch from another.

The first whose variables are set counts: a torchrun that srun has started numbers its own processes.
"""


RANK_VARIABLES = tuple(of_rank for _, of_rank, _, _ in _LAUNCHERS)


@dataclass(frozen=True, slots=True)
class RankInfo:
    """One process of those that a launcher has started together."""

    rank: int
    world_size: int
    launch: str
    """What the launcher tells all of them about itself; other launches mostly have another text"""


def find_rank(environment: Mapping[str, str]) -> RankInfo:
    """Return which of a launcher's processes this is. Raises UsageError if no launcher has started it.

    The variables follow the documentation of torchrun, Slurm (``srun``), Open MPI, and MPICH (``PMI``). Whatever a
    process of a launch starts inherits them, so they do not show whether *this* program was launched several times:
    only ask when the user says so.
    """
    for name, of_rank, of_size, of_launch in _LAUNCHERS:
        size = next((variable for variable in of_size if variable in environment), None)
        if of_rank not in environment or size is None:
            continue
        rank, world_size = _number(environment, of_rank), _number(environment, size)
        if rank >= world_size:
            what = f"{of_rank}={rank} and {size}={world_size} contradict each other"
            raise UsageError.at("--distributed", what, f"start the command with {name}")
        return RankInfo(rank, world_size, " ".join([name, *(environment.get(one, "-") for one in of_launch)]))
    fix = "start the command with torchrun, srun or mpirun, or omit the option"
    raise UsageError.at("--distributed", "no launcher has set the ranks of the processes", fix)


def _number(environment: Mapping[str, str], variable: str) -> int:
    if not (text := environment[variable].strip()).isdecimal():
        raise UsageError.at(variable, f"{text!r:.40} is not a number", "start the command with torchrun or srun")
    return int(text)
