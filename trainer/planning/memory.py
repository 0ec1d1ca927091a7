"""The memory of each rank of each role, and whether it fits.

Roles on a device take turns. Each has memory that stays on the device and memory that only its turn takes.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel

from trainer.cluster.nodes import ClusterNode, Slot
from trainer.config.sections.roles import ActorConfig, CriticConfig
from trainer.config.tree import WorkersConfig
from trainer.errors import ConfigError
from trainer.planning.activations import pass_bytes
from trainer.planning.model_size import ModelSize, parameters
from trainer.planning.placement import Placement, on_shared_gpus
from trainer.weights.buckets import BUCKET_BYTES, BUCKETS_AT_ONCE
from trainer.weights.transfer import choose_transport

Section = TypeVar("Section", bound=BaseModel)

GIB = 2**30
LEAST_FOR_ENGINES = 0.2  # share of a GPU to suggest for engines before suggesting any offload
# CUDA's context and libraries of a process; an engine's graphs and workspace.
PROCESS_GIB, GRAPHS_GIB = 0.8, 3.0
ESTIMATES = (
    f"; in that, each process takes an estimated {PROCESS_GIB} for CUDA, and each engine with rollout.kv_cache_gib "
    f"{GRAPHS_GIB} for its graphs"
)
# Buckets of weights on an engine's GPU at a time.
BUCKETS_ON_GPU = {"CUDA IPC": BUCKETS_AT_ONCE, "NCCL": 2, "Ray's object store": 1}
# The turn in which the actor's weights are sent, by the name that it has in the metrics.
SENDING = "sync_weights"
TYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Share:
    """GiB of one rank of a role, or of what the actor sends: what stays on its device, what its turn adds, and an
    estimate of what the passes of its turn add to that. `processes` is the part of `resting` that its processes take by
    themselves."""

    role: str
    slot: Slot
    resting: float
    working: float = 0.0
    passes: float = 0.0
    processes: float = 0.0


def shares(config: WorkersConfig, placement: Placement) -> list[Share]:
    """The memory of each rank of each role. What the actor's first rank keeps while it sends weights is a turn of its
    own."""
    parts = cache(partial(_parts, config, placement))  # ranks of a role differ only in their devices
    needed = [
        Share(role, slot, *parts(role, slot.node.device_gib)) for role, slots in placement.items() for slot in slots
    ]
    if sent := sent_gib(config, placement):
        needed.append(Share(SENDING, placement["actor"][0], 0.0, sent))
    return needed


def by_device(all_shares: Sequence[Share]) -> list[list[Share]]:
    """The shares of each device."""
    devices: dict[tuple[str, int], list[Share]] = defaultdict(list)
    for share in all_shares:
        devices[share.slot.node.address, share.slot.rank].append(share)
    return list(devices.values())


def model_of(config: WorkersConfig, role: str) -> Path:
    """The model whose weights a role starts with."""
    others = {"critic": config.critic.path, "teacher": config.distillation.teacher}
    return others.get(role) or config.model.directory


def settings_of(config: WorkersConfig, role: str) -> ActorConfig | CriticConfig:
    """The settings by which a role's network is sharded and trained. A reference and a teacher follow the actor."""
    return config.critic if role == "critic" else config.actor


def size_of(config: WorkersConfig, role: str) -> ModelSize | None:
    """The sizes of a role's network, None if they are unknown. A critic has no head over the vocabulary."""
    size = ModelSize.read(model_of(config, role))
    return replace(size, head=0) if size is not None and role == "critic" else size


def copied_gib(config: WorkersConfig, placement: Placement) -> float:
    """GiB that the actor's weights take on an engine's GPU until it has copied them: some buckets, one of which may be
    the whole embedding, or all of them if engines cannot load in parts."""
    transport = _transport(config, placement)
    if transport is None or placement["rollout"][0].device == "cpu":
        return 0.0
    dtype = config.model.dtype_on("cuda")
    whole, size = _whole_gib(config, dtype), size_of(config, "actor")
    if size is None or not config.loads_in_parts:
        return whole
    embedding = size.vocabulary * size.hidden * TYPE_BYTES[dtype]
    return min(whole, (BUCKETS_ON_GPU[transport] * BUCKET_BYTES + embedding) / GIB)


def sent_gib(config: WorkersConfig, placement: Placement) -> float:
    """GiB that a broadcast over NCCL takes on the GPU of the actor's first rank, which keeps all buckets until the last
    one is sent: all weights, and its shard of them if that is offloaded. 0 without such a broadcast."""
    if _transport(config, placement) != "NCCL":
        return 0.0
    sharding = config.actor.sharding
    held = _held_parameters(config, "actor", len(placement["actor"]))
    shard = held * TYPE_BYTES[config.actor.weights_dtype] / GIB
    return _whole_gib(config, config.model.dtype_on("cuda")) + shard * sharding.param_offload


def _transport(config: WorkersConfig, placement: Placement) -> str | None:
    """How all weights of the actor reach the engines. None without engines, and with adapters: they are small compared
    with the model."""
    actor, engines = placement.get("actor"), placement.get("rollout")
    if not actor or not engines or config.engines_apply_adapters:
        return None
    processes = [slot for slot in engines for _ in range(config.rollout.engines_per_gpu)]
    transport, _ = choose_transport(
        config.rollout.weight_transfer, actor, processes, on_shared_gpus(placement), config.trainer.deterministic
    )
    return transport


def _whole_gib(config: WorkersConfig, dtype: str) -> float:
    """GiB of all of the actor's weights in this type."""
    return parameters(model_of(config, "actor")) * TYPE_BYTES[dtype] / GIB


def _parts(
    config: WorkersConfig, placement: Placement, role: str, device_gib: float | None
) -> tuple[float, float, float, float]:
    """The parts of a share, in their order."""
    resting, working, *passes = _gib(config, placement, role, device_gib)
    processes = _processes_gib(config, role, placement[role][0].device)
    return resting + processes, working, sum(passes), processes


def _processes_gib(config: WorkersConfig, role: str, device: str) -> float:
    """GiB that the processes of a rank take of their GPU. Rewards by rule use none."""
    if device == "cpu" or (role == "reward" and config.reward.model.path is None):
        return 0.0
    return PROCESS_GIB * (config.rollout.engines_per_gpu if role == "rollout" else 1)


def _gib(
    config: WorkersConfig, placement: Placement, role: str, device_gib: float | None
) -> tuple[float, float] | tuple[float, float, float]:
    """What stays, what a turn adds, and its passes, beside the processes."""
    ranks, device = len(placement[role]), placement[role][0].device
    width, on_gpu = TYPE_BYTES[config.model.dtype_on(device)], device == "cuda"
    if role == "reward":
        reward_model = config.reward.model
        type_bytes = TYPE_BYTES[reward_model.dtype or config.model.dtype_on(device)]
        return (parameters(reward_model.path) / GIB * type_bytes if reward_model.path else 0.0), 0.0
    if role == "rollout":
        taken = _engine_gib(config, parameters(model_of(config, role)) / GIB * width, on_gpu, device_gib)
        copy = copied_gib(config, placement)
        return (0.0, taken + copy) if on_gpu and config.rollout.sleep else (taken, copy)
    held, leaving = _held_parameters(config, role, ranks) / GIB, _leaving_gib(config, role, ranks, device)
    settings = settings_of(config, role)
    if _keeps_weights_only(config, role):
        return held * width - leaving, leaving
    weights = gradients = held * TYPE_BYTES[settings.weights_dtype]
    states = _states_gib(config, role, ranks)
    passes = _passes_gib(config, role, ranks, device)
    return weights + states - leaving, gradients + leaving, max(0.0, passes - away_gib(config, role, ranks, device))


def _keeps_weights_only(config: WorkersConfig, role: str) -> bool:
    """Whether a role has no gradients and states, or few: adapters are small compared with the model."""
    return role in ("reference", "teacher") or settings_of(config, role).lora.rank > 0


def _held_parameters(config: WorkersConfig, role: str, ranks: int) -> float:
    """Parameters of a role's network in the shard of each rank."""
    return parameters(model_of(config, role)) / (settings_of(config, role).sharding.shard_size or ranks)


def _leaving_gib(config: WorkersConfig, role: str, ranks: int, device: str) -> float:
    """GiB that a rank of a training role moves to its node's memory while it is idle."""
    settings, held = settings_of(config, role), _held_parameters(config, role, ranks) / GIB
    sharding, frozen = settings.sharding, role in ("reference", "teacher")
    if device == "cpu":
        return 0.0
    if _keeps_weights_only(config, role):
        leaves = config.reference.param_offload if frozen else sharding.param_offload
        return held * TYPE_BYTES[config.model.dtype_on(device)] * leaves
    weights = held * TYPE_BYTES[settings.weights_dtype] * sharding.param_offload
    return weights + _states_gib(config, role, ranks) * sharding.optimizer_offload


def offloaded_gib(config: WorkersConfig, placement: Placement) -> dict[ClusterNode, float]:
    """GiB of each node's memory for what its ranks offload."""
    nodes: dict[ClusterNode, float] = defaultdict(float)
    for role, slots in placement.items():
        if role not in ("rollout", "reward"):
            leaving = _leaving_gib(config, role, len(slots), slots[0].device)
            for slot in slots:
                nodes[slot.node] += leaving
    return {node: gib for node, gib in nodes.items() if gib}


def away_gib(config: WorkersConfig, role: str, ranks: int, device: str) -> float:
    """GiB of a rank's optimizer state that is on the GPU in the role's turn, but not during its passes: a turn with one
    optimizer step loads it when the activations are freed."""
    settings = settings_of(config, role)
    several = settings.ppo_epochs > 1 or config.responses > settings.mini_batch_size
    if device == "cpu" or several or settings.lora.rank or not settings.sharding.optimizer_offload:
        return 0.0
    return _states_gib(config, role, ranks)


def _states_gib(config: WorkersConfig, role: str, ranks: int) -> float:
    """GiB of the optimizer state of a rank that trains all weights."""
    settings = settings_of(config, role)
    return _held_parameters(config, role, ranks) / GIB * TYPE_BYTES[settings.weights_dtype] * settings.optimizer.states


def _passes_gib(config: WorkersConfig, role: str, ranks: int, device: str) -> float:
    """An estimate for passes of actor and critic, 0 where tokens or sizes are unknown."""
    settings = settings_of(config, role)
    size, tokens = size_of(config, role), settings.micro_batch_tokens
    if device == "cpu" or size is None or tokens is None:
        return 0.0
    width = TYPE_BYTES[config.model.dtype_on(device)]
    return pass_bytes(size, settings, width, ranks, tokens) / GIB


def _engine_gib(config: WorkersConfig, weights: float, on_gpu: bool, device_gib: float | None) -> float:
    """GiB of all engines of a device, beside their processes."""
    cache, engines = config.rollout.kv_cache_gib, config.rollout.engines_per_gpu if on_gpu else 1
    if on_gpu and device_gib is not None and cache is None:
        processes = _processes_gib(config, "rollout", "cuda")  # vLLM's share of the GPU includes them
        return max(0.0, config.rollout.gpu_memory_utilization * device_gib - processes)
    # On CPU all ranks of an engine are on one node.
    split = config.rollout.tensor_parallel if on_gpu else 1
    return engines * (weights / split + (GRAPHS_GIB if on_gpu else 0.0) + (cache or 0.5))


def copies_gib(config: WorkersConfig, placement: Placement) -> float:
    """GiB of each node's memory for the copies of the trained roles that `trainer.redundancy` asks for; three times as
    much while they are renewed: the old ones, the new ones, and those that are being sent."""
    gib, nodes = 0.0, set[str]()
    for role, settings in config.trained.items():
        if role in placement and not settings.lora.rank:  # adapters are small compared with the model
            width = TYPE_BYTES[settings.weights_dtype] * (1 + settings.optimizer.states)
            gib += parameters(model_of(config, role)) / GIB * width
            nodes |= {slot.node.id for slot in placement[role]}
    return config.trainer.redundancy * gib / max(1, len(nodes))


def table(all_shares: Sequence[Share]) -> list[str]:
    """A line per rank of a role: role, node, device, GiB that stay, GiB that its turn adds, of which passes."""
    lines = [("role", "node", "device", "GiB at rest", "in its turn", "of that, passes")]
    for share in all_shares:
        device = f"{share.slot.device} {share.slot.rank}"
        turn, passes = share.working + share.passes, f"~{share.passes:.2f}" if share.passes else ""
        lines.append((share.role, share.slot.node.address, device, f"{share.resting:.2f}", f"{turn:.2f}", passes))
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def check_fit(all_shares: Sequence[Share], others: Iterable[tuple[str, Sequence[Share]]] = ()) -> None:
    """Raises ConfigError if the roles on a device need more memory than it has, passes aside; devices whose memory is
    unknown are not checked.

    `others` lists other settings with their shares: the error suggests the first that fit.
    """
    load = _fullest(all_shares)
    if load is None or load.lacking <= 0:
        return
    parts = ", ".join(f"{share.role} {share.resting + share.working:.1f}" for share in load.shares)
    estimates = ESTIMATES if load.shares[0].slot.device == "cuda" else ""
    hint = "use more devices, give roles devices of their own with device_mapping.ROLE, or take a smaller model"
    for settings, shared in others:
        if (then := _fullest(shared)) and then.lacking <= 0:
            hint = f"set {settings}: then {then.needed:.1f} GiB are needed, activations aside"
            break
    raise ConfigError(
        f"{load.device} has {load.device_gib:.1f} GiB, {load.lacking:.1f} less than the {load.needed:.1f} that are "
        f"needed: {parts}{estimates}",
        hint=hint,
    )


def tight(all_shares: Sequence[Share]) -> str | None:
    """A warning if the fullest device may run out of memory in a pass, else None."""
    load = _fullest(all_shares, passes=True)
    if load is None or load.lacking <= 0:
        return None
    role = max(load.shares, key=lambda share: share.passes).role
    return (
        f"{load.device} has {load.device_gib:.1f} GiB, and passes of the {role} may need {load.lacking:.1f} more: "
        f"lower {role}.micro_batch_tokens, or set {role}.activation_checkpointing=true"
    )


@dataclass(frozen=True)
class _Load:
    """GiB that the roles on a device need: what stays, and the largest turn."""

    shares: Sequence[Share]
    needed: float
    device_gib: float

    @property
    def device(self) -> str:
        slot = self.shares[0].slot
        return f"{slot.device} {slot.rank} of {slot.node.address}"

    @property
    def lacking(self) -> float:
        """GiB that the device has too few; negative if some are left."""
        return self.needed - self.device_gib


def _fullest(all_shares: Sequence[Share], passes: bool = False) -> _Load | None:
    """The device that lacks most memory, or has least left; None if the memory of none is known."""
    loads = [
        _Load(on_device, _needed(on_device, passes), gib)
        for on_device in by_device(all_shares)
        if (gib := on_device[0].slot.node.device_gib) is not None
    ]
    return max(loads, key=lambda load: load.lacking, default=None)


def _needed(shares_of_device: Sequence[Share], passes: bool) -> float:
    turns = (share.working + (share.passes if passes else 0.0) for share in shares_of_device)
    return sum(share.resting for share in shares_of_device) + max(turns)


def alternatives(config: WorkersConfig, placement: Placement) -> Iterator[tuple[str, list[Share]]]:
    """Settings that save memory, cumulatively, and the resulting shares."""
    savings: list[dict[str, float | bool | str]] = [
        {f"{role}.sharding.optimizer_offload": True for role in config.trained},
        {f"{role}.sharding.param_offload": True for role in config.trained},
        {"reference.param_offload": True},
    ]
    if config.rollout.kv_cache_gib is None and config.rollout.gpu_memory_utilization > LEAST_FOR_ENGINES:
        savings.insert(0, {"rollout.gpu_memory_utilization": LEAST_FOR_ENGINES})
    if sent_gib(config, placement):
        savings.insert(0, {"rollout.weight_transfer": "object_store"})
    settings: dict[str, float | bool | str] = {}
    for saving in savings:
        settings |= saving
        for key, value in saving.items():
            config = with_setting(config, key, value)
        text = " ".join(f"{key}={str(value).lower()}" for key, value in settings.items())
        yield text, shares(config, placement)


def with_setting(section: Section, key: str, value: float | bool | str | None) -> Section:
    """A copy of a settings section with a new value at a key such as actor.sharding.param_offload."""
    name, _, rest = key.partition(".")
    inner = with_setting(getattr(section, name), rest, value) if rest else value
    return section.model_copy(update={name: inner})
