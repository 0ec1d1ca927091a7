"""MPI launchers that tell numbers and no head: Hydra, MVAPICH2, PALS, and horovodrun with Gloo."""

from typing import ClassVar

from entrypoints.environments.base import Allocation, Environment, scheduler_job_id
from entrypoints.environments.mpi.tasks import HYDRA, MVAPICH, ONE_PER_NODE, by_tasks
from entrypoints.environments.process_view import ProcessView, Reader
from entrypoints.errors import DetectionError


class _Numbered(Environment):
    numbers: ClassVar[tuple[str, str, str, str]]
    """The variables of rank, size, local rank and local size."""

    @classmethod
    def detect(cls, view: ProcessView) -> Allocation | None:
        if not view.variables.get(cls.numbers[0]) or not view.variables.get(cls.numbers[1]):
            return None
        return by_tasks(cls.name, view, Reader(view.variables), cls.numbers)


class Mvapich(_Numbered):
    name = "mvapich"
    precedence = 420
    title = "MVAPICH2"
    numbers = reads = MVAPICH
    caveats = "No variable names the head: set SLIPWAY_HEAD on every node."
    start = "mpirun_rsh -np 2 -hostfile HOSTS SLIPWAY_HEAD=$(head -n1 HOSTS) LAUNCH"
    source = "https://mvapich.cse.ohio-state.edu/userguide/"


class Hydra(_Numbered):
    """The mpiexec of MPICH, Intel MPI and MVAPICH 3."""

    name = "hydra"
    precedence = 440
    title = "Hydra (MPICH, Intel MPI)"
    numbers = reads = HYDRA
    caveats = "No variable names the head: set SLIPWAY_HEAD. Slurm and Flux set PMI_RANK too and take precedence."
    run_under = "MPICH 4.0"
    start = "mpiexec -ppn 1 -genv SLIPWAY_HEAD $(hostname) LAUNCH"
    source = "https://github.com/pmodels/mpich/blob/main/doc/wiki/how_to/Using_the_Hydra_Process_Manager.md"


class Pals(Environment):
    """HPE's mpiexec of Cray systems without Slurm."""

    name = "pals"
    precedence = 430
    title = "PALS (HPE Cray)"
    reads = ("PALS_RANKID", "PALS_NODEID", "PALS_LOCAL_RANKID", "PALS_APID", "PMI_SIZE", "PMI_LOCAL_SIZE")
    caveats = "No variable names the head. In a PBS job the node file does; otherwise set SLIPWAY_HEAD."
    start = "mpiexec -ppn 1 --env SLIPWAY_HEAD=$(hostname) LAUNCH"
    source = "https://cpe.ext.hpe.com/docs/latest/pals/index.html"

    @classmethod
    def detect(cls, view: ProcessView) -> Allocation | None:
        reader = Reader(view.variables)
        if reader.text("PALS_RANKID") is None or view.variables.get(
            "SLURM_STEP_ID"
        ):  # Slurm sets it too on Cray systems
            return None
        size = reader.required_number("PMI_SIZE", "PALS_SIZE", hint=ONE_PER_NODE)
        local_size = reader.number("PMI_LOCAL_SIZE", "PALS_LOCAL_SIZE") or 1
        if size % local_size:
            raise DetectionError(f"PMI_SIZE is {size}, not a multiple of PMI_LOCAL_SIZE {local_size}", ONE_PER_NODE)
        count = size // local_size
        return Allocation(
            environment=cls.name,
            job_id=scheduler_job_id(view.variables) or reader.text("PALS_APID") or "pals",
            node_count=count,
            node_rank=reader.required_number("PALS_NODEID", hint=ONE_PER_NODE),
            local_rank=reader.required_number("PALS_LOCAL_RANKID", hint=ONE_PER_NODE),
            head=view.hostname if count == 1 else None,
            variables=reader.used,
        )


class Horovod(Environment):
    """horovodrun with Gloo: the cross rank counts nodes. With MPI it calls mpirun, whose variables decide."""

    name = "horovod"
    precedence = 450
    title = "Horovod (Gloo)"
    reads = (
        "HOROVOD_RANK",
        "HOROVOD_SIZE",
        "HOROVOD_CROSS_RANK",
        "HOROVOD_CROSS_SIZE",
        "HOROVOD_LOCAL_RANK",
        "HOROVOD_GLOO_RENDEZVOUS_PORT",
    )
    caveats = (
        "No variable names the head: set SLIPWAY_HEAD. HOROVOD_GLOO_RENDEZVOUS_ADDR is the machine of horovodrun, "
        "which may run no task."
    )
    start = "SLIPWAY_HEAD=gpu-0 horovodrun -np 2 -H gpu-0:1,gpu-1:1 LAUNCH"
    source = "https://horovod.readthedocs.io/en/stable/api.html"

    @classmethod
    def detect(cls, view: ProcessView) -> Allocation | None:
        reader = Reader(view.variables)
        if reader.text("HOROVOD_RANK") is None:
            return None
        count = reader.required_number("HOROVOD_CROSS_SIZE", hint=ONE_PER_NODE)
        port = reader.text("HOROVOD_GLOO_RENDEZVOUS_PORT") or ""
        return Allocation(
            environment=cls.name,
            job_id=scheduler_job_id(view.variables) or f"horovod:{port}",
            node_count=count,
            node_rank=reader.required_number("HOROVOD_CROSS_RANK", hint=ONE_PER_NODE),
            local_rank=reader.required_number("HOROVOD_LOCAL_RANK", hint=ONE_PER_NODE),
            task_count=reader.required_number("HOROVOD_SIZE", hint=ONE_PER_NODE),
            head=view.hostname if count == 1 else None,
            variables=reader.used,
        )
