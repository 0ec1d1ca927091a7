"""Services and controllers that tell the number of nodes, this node's rank and the head: a row each."""

from typing import ClassVar

from entrypoints.environments.base import Allocation, Environment
from entrypoints.environments.explicit import HEAD
from entrypoints.environments.process_view import ProcessView, Reader
from entrypoints.errors import DetectionError

Names = tuple[str, ...]
"""Variables with one meaning; the first that is set counts."""


class Service(Environment):
    """A row of the table: which variables tell what. The service is present if the count is set."""

    count: ClassVar[Names]
    rank: ClassVar[Names]
    head: ClassVar[Names] = ()
    hosts: ClassVar[Names] = ()
    """A list of the nodes, in order of rank."""
    job: ClassVar[Names] = ()
    """The job's id; by default its head."""
    marks: ClassVar[Names] = ()
    """At least one of these must be set, too: others set the variable of the count as well."""
    hint: ClassVar[str]
    """The source of a variable that is missing."""

    @classmethod
    def detect(cls, view: ProcessView) -> Allocation | None:
        """The allocation.

        The user's SLIPWAY_HEAD takes the place of a head that is not told; without it, it is this node if its rank is
        0. A list of other than `count` hosts does not count.
        """
        reader = Reader(view.variables)
        if reader.text(*cls.count) is None or (cls.marks and not any(map(view.variables.get, cls.marks))):
            return None
        nodes = reader.required_number(*cls.count, hint=cls.hint)
        hosts = cls.listed(reader)
        node_rank = 0 if nodes == 1 else reader.required_number(*cls.rank, hint=cls.hint)
        head = reader.host(*cls.head) or (hosts[0] if hosts else None) or reader.host(HEAD)
        if head is None and node_rank > 0:
            raise DetectionError(f"{cls.name} does not name the head of {nodes} nodes", hint=cls.hint)
        if nodes == 1 or head is None:
            head = view.hostname
        return Allocation(
            environment=cls.name,
            job_id=reader.text(*cls.job) or head,
            node_count=nodes,
            node_rank=node_rank,
            hosts=hosts if len(hosts) == nodes else None,
            head=head,
            variables=reader.used,
        )

    @classmethod
    def listed(cls, reader: Reader) -> tuple[str, ...]:
        """The hosts in order of rank; empty if the service does not list them. Raises DetectionError."""
        return reader.hosts(*cls.hosts)


class Dstack(Service):
    name = "dstack"
    precedence = 332
    title = "dstack"
    count, rank = ("DSTACK_NODES_NUM",), ("DSTACK_NODE_RANK",)
    head, hosts = ("DSTACK_MASTER_NODE_IP",), ("DSTACK_NODES_IPS",)
    job = ("DSTACK_RUN_ID", "DSTACK_RUN_NAME")
    reads = (*count, *rank, *head, *hosts, "DSTACK_RUN_NAME")
    hint = "dstack sets it in tasks; pass DSTACK_* into the container"
    caveats = "One variable has one address per line. DSTACK_GPUS_NUM counts the GPUs of all nodes."
    start = "type: task, nodes: 2, image: IMAGE, commands: [LAUNCH]"
    source = "https://dstack.ai/docs/concepts/tasks/"


class RunPod(Service):
    name = "runpod"
    precedence = 340
    title = "RunPod Instant Clusters"
    count, rank = ("NUM_NODES",), ("NODE_RANK",)
    head = ("PRIMARY_ADDR", "MASTER_ADDR")
    marks = ("PRIMARY_ADDR", "RUNPOD_POD_ID")
    reads = ("PRIMARY_ADDR", *rank, *count)
    hint = "an Instant Cluster sets it on every pod"
    caveats = "WORLD_SIZE counts GPUs. eth0 leads to the internet; the cluster's network is ens1 and above."
    start = "container start command: LAUNCH"
    source = "https://docs.runpod.io/instant-clusters/configuration"


class Metaflow(Service):
    name = "metaflow"
    precedence = 342
    title = "Metaflow (num_parallel)"
    count, rank, head = ("MF_PARALLEL_NUM_NODES",), ("MF_PARALLEL_NODE_INDEX",), ("MF_PARALLEL_MAIN_IP",)
    reads = (*count, *rank, *head)
    hint = "Metaflow sets it in steps that are called with num_parallel"
    caveats = "With the local runner all nodes are processes of one machine, and the head is 127.0.0.1."
    start = "subprocess.run([LAUNCH]) in the step"
    source = "https://docs.metaflow.org/scaling/remote-tasks/distributed-computing"


class Volcengine(Service):
    name = "volcengine"
    precedence = 350
    title = "Volcengine MLP"
    count, rank = ("MLP_WORKER_NUM",), ("MLP_ROLE_INDEX",)
    head, hosts, job = ("MLP_WORKER_0_HOST",), ("MLP_WORKER_ALL_HOSTS",), ("MLP_TASK_ID",)
    role = "MLP_ROLE"
    reads = (*count, *rank, *head, *hosts, role, *job)
    hint = "the platform sets it in custom training; pass MLP_* on"
    caveats = "Only workers are nodes. MLP_WORKER_GPU counts the GPUs of one node."
    start = "command of the worker role: LAUNCH   # framework PyTorchDDP or Custom"
    source = "https://volcengine.com/docs/6459/75329"

    @classmethod
    def listed(cls, reader: Reader) -> tuple[str, ...]:
        role = reader.text(cls.role) or "WORKER"
        if role.upper() != "WORKER":
            raise DetectionError(f"{cls.role} is {role}, but only workers are nodes", "start `launch` in workers only")
        return super().listed(reader)


class Lepton(Service):
    name = "lepton"
    precedence = 355
    title = "DGX Cloud Lepton"
    count, rank, job = ("LEPTON_JOB_TOTAL_WORKERS",), ("LEPTON_JOB_WORKER_INDEX",), ("LEPTON_JOB_NAME",)
    prefix = ("LEPTON_JOB_WORKER_PREFIX", "LEPTON_JOB_WORKER_HOSTNAME_PREFIX")
    subdomain = "LEPTON_SUBDOMAIN"
    reads = (*count, *rank, "LEPTON_JOB_WORKER_PREFIX", subdomain, *job)
    hint = "Lepton sets it in batch jobs; enable communication between the workers"
    caveats = "The workers have names only if the job enables communication between them."
    start = "run command of the batch job: LAUNCH"
    source = "https://docs.nvidia.com/dgx-cloud/lepton/features/batch-jobs/predefined-env-vars"

    @classmethod
    def listed(cls, reader: Reader) -> tuple[str, ...]:
        nodes = reader.required_number(*cls.count, hint=cls.hint)
        if nodes == 1:  # it needs no name
            return ()
        prefix = reader.required(*cls.prefix, hint=cls.hint)
        subdomain = reader.required(cls.subdomain, hint=cls.hint)
        return tuple(f"{prefix}-{index}.{subdomain}" for index in range(nodes))


class Arnold(Service):
    name = "arnold"
    precedence = 360
    title = "Arnold"
    count, rank = ("ARNOLD_WORKER_NUM",), ("ARNOLD_ID",)
    head = ("ARNOLD_WORKER_0_HOST", "METIS_WORKER_0_HOST")
    hosts = ("ARNOLD_WORKER_HOSTS", "METIS_WORKER_HOSTS")
    marks = (*rank, *head, *hosts)
    reads = (*count, *rank, head[0], hosts[0])
    hint = "Arnold sets it in every worker"
    caveats = "The hosts have ports; IPv6 addresses are in brackets. ARNOLD_WORKER_GPU counts the GPUs of one node."
    start = "command of the workers: LAUNCH"
    source = "https://github.com/verl-project/verl-recipe/blob/main/retool/run_qwen2_7b_sft.sh"


class SenseCore(Service):
    name = "sensecore"
    precedence = 365
    title = "SenseCore"
    count, rank, head = ("SENSECORE_PYTORCH_NNODES",), ("SENSECORE_PYTORCH_NODE_RANK",), ("MASTER_ADDR",)
    reads = (*count, *rank, *head)
    hint = "SenseCore sets it in PyTorch jobs"
    caveats = "SENSECORE_ACCELERATE_DEVICE_COUNT counts the devices of one node."
    start = "command of the job: LAUNCH"
    source = "https://www.sensecore.cn"


class Beaker(Service):
    name = "beaker"
    precedence = 370
    title = "Beaker"
    count, rank = ("BEAKER_REPLICA_COUNT",), ("BEAKER_REPLICA_RANK",)
    head, job = ("BEAKER_LEADER_REPLICA_HOSTNAME",), ("BEAKER_WORKLOAD_ID",)
    reads = (*count, *rank, *head, *job)
    hint = "set leaderSelection and hostNetworking for the task's replicas"
    caveats = "The head is named only with leaderSelection, and reached only with hostNetworking."
    start = "command: [LAUNCH]   # replicas: 2, leaderSelection: true, hostNetworking: true"
    source = "https://github.com/allenai/beaker-gantry"


class BaseCommand(Service):
    name = "base_command"
    precedence = 375
    title = "NVIDIA Base Command Platform"
    count, rank, head, job = ("NGC_ARRAY_SIZE",), ("NGC_ARRAY_INDEX",), ("NGC_MASTER_ADDR",), ("NGC_JOB_ID",)
    reads = (*count, *rank, *head, *job)
    hint = "start one task per node with bcprun --nnodes $NGC_ARRAY_SIZE --npernode 1, and set NGC_MASTER_ADDR"
    caveats = "NGC_GPUS_PER_NODE counts GPUs. The command of a job of type MPI runs on its first node only."
    start = 'bcprun --nnodes $NGC_ARRAY_SIZE --npernode 1 --cmd "LAUNCH"'
    source = "https://docs.nvidia.com/base-command-platform/user-guide/latest/"


class Snowflake(Service):
    name = "snowflake"
    precedence = 386
    title = "Snowflake ML Jobs (parallel)"
    count, rank = ("SNOWFLAKE_JOBS_COUNT",), ("SNOWFLAKE_JOB_INDEX",)
    head, hosts, job = ("MLRS_HEAD_IP",), ("MLRS_NODE_IPS",), ("SNOWFLAKE_SERVICE_NAME",)
    reads = (*count, *rank, *head, *hosts, *job)
    hint = "submit an ML Job with target_instances and parallel=True, which sets MLRS_HEAD_IP, or set SLIPWAY_HEAD"
    caveats = "A job service that is no ML Job names no addresses: set SLIPWAY_HEAD. Instances have no host names."
    start = 'submit_directory(…, entrypoint=["bash", "-c", "LAUNCH"], target_instances=2, parallel=True)'
    source = "https://docs.snowflake.com/developer-guide/snowflake-ml/ml-jobs/overview"


class Kubeflow(Service):
    """A TrainJob: torchrun's variables in the pods of a JobSet."""

    name = "kubeflow"
    precedence = 530
    title = "Kubeflow Trainer v2"
    count, rank, head = ("PET_NNODES",), ("PET_NODE_RANK",), ("PET_MASTER_ADDR",)
    marks = ("KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX")
    reads = (*count, *rank, *head)
    hint = "the trainer's torch runtime sets these variables: see `kubectl describe trainjob`"
    caveats = "PET_NPROC_PER_NODE is for torchrun only."
    start = "spec.trainer.command: LAUNCH"
    source = "https://www.kubeflow.org/docs/components/trainer/user-guides/pytorch/"


class JaxJob(Service):
    name = "jax_job"
    precedence = 524
    title = "Kubeflow JAXJob"
    count, rank = ("NUM_PROCESSES", "JAX_NUM_PROCESSES"), ("PROCESS_ID", "JAX_PROCESS_ID")
    head = marks = ("COORDINATOR_ADDRESS", "JAX_COORDINATOR_ADDRESS")
    reads = (*head, *count, *rank)
    hint = "the training operator sets it in every worker; JAX's own names start with JAX_"
    caveats = "NUM_PROCESSES counts pods. JAX's own variables are read too, for one process per node."
    start = "command of the Worker template: LAUNCH"
    source = "https://www.kubeflow.org/docs/components/trainer/legacy-v1/user-guides/jax/"
