"""Assigns roles to devices, prints the plan, and checks that it fits into memory."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import psutil
from pydantic import BaseModel

from trainer.cluster.nodes import Slot
from trainer.config.device_mapping import parse_devices
from trainer.config.tree import Config
from trainer.errors import ConfigError
from trainer.models.files import parameter_count

Section = TypeVar("Section", bound=BaseModel)

GIB = 2**30
LEAST_FOR_ENGINES = 0.2  # share of a GPU to suggest for engines before suggesting any offload
TYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Share:
    """The memory of one rank of a role without activations, and the part of it that is offloaded between its turns."""

    role: str
    slot: Slot
    gib: float
    offloaded_gib: float = 0.0


def place_roles(config: Config, slots: Sequence[Slot], roles: Sequence[str]) -> dict[str, list[Slot]]:
    """The slots of each role in the order of its ranks: those of its mapping, or all. Raises ConfigError."""
    return {role: _mapped(role, getattr(config.device_mapping, role), slots) for role in roles}


def _mapped(role: str, mapping: str | None, slots: Sequence[Slot]) -> list[Slot]:
    if mapping is None:
        return list(slots)
    nodes = list(_by_node(slots).values())
    chosen = []
    for node, device in parse_devices(mapping):
        if node >= len(nodes) or device >= len(nodes[node]):
            there = ", ".join(f"node{at} ({own[0].node.address}): {len(own)}" for at, own in enumerate(nodes))
            raise ConfigError(
                f"device_mapping.{role}={mapping}: there is no device {device} of node{node}",
                hint=f"devices of each node: {there}",
            )
        chosen.append(nodes[node][device])
    return chosen


def engine_slots(config: Config, slots: Sequence[Slot]) -> list[list[Slot]]:
    """The slots of each rank of each engine: neighbouring GPUs of a node, or the same node again and again on CPU.

    Raises ConfigError if the model or the GPUs of a node cannot be split that way.
    """
    size = config.rollout.tensor_parallel
    if size == 1 or slots[0].device == "cpu":
        return [[slot] * size for slot in slots]
    engines = []
    for own in _by_node(slots).values():
        if len(own) % size:
            raise ConfigError(
                f"rollout.tensor_parallel={size} does not divide the {len(own)} GPUs of the rollout engines on "
                f"{own[0].node.address}",
                hint="set it to a divisor of the GPUs that every node has for them: an engine stays within a node",
            )
        engines += [own[first : first + size] for first in range(0, len(own), size)]
    return engines


def _by_node(slots: Sequence[Slot]) -> dict[str, list[Slot]]:
    nodes: dict[str, list[Slot]] = defaultdict(list)
    for slot in slots:
        nodes[slot.node.id].append(slot)
    return nodes


def shares(config: Config, placement: Mapping[str, Sequence[Slot]], device_gib: float | None) -> list[Share]:
    """The memory of each rank of each role; engines on a GPU take their share of `device_gib`."""
    return [
        Share(role, slot, *_gib(config, role, len(slots), slot.device, device_gib))
        for role, slots in placement.items()
        for slot in slots
    ]


def _gib(config: Config, role: str, ranks: int, device: str, device_gib: float | None) -> tuple[float, float]:
    """GiB of a rank, and how many of them are offloaded between its turns."""
    model = config.model.directory
    others = {"critic": config.critic.path, "teacher": config.distillation.teacher}
    size = parameter_count(others.get(role) or model) / GIB
    width = TYPE_BYTES[config.model.dtype_on(device)]
    on_gpu = device == "cuda"
    if role in ("actor", "critic"):
        settings = config.actor if role == "actor" else config.critic
        share = size / (settings.sharding.shard_size or ranks)
        if settings.lora.rank:  # adapters are small compared with the model
            return share * width, share * width * settings.sharding.param_offload * on_gpu
        trained, states = share * TYPE_BYTES[settings.weights_dtype], settings.optimizer.states
        offloaded = settings.sharding.param_offload + states * settings.sharding.optimizer_offload
        return trained * (2 + states), trained * offloaded * on_gpu  # weights, gradients and the optimizer's states
    if role in ("reference", "teacher"):
        share = size * width / (config.actor.sharding.shard_size or ranks)
        return share, share * (config.reference.param_offload and on_gpu)
    if role == "reward":
        reward_model = config.reward.model
        type_bytes = TYPE_BYTES[reward_model.dtype or config.model.dtype_on(device)]
        return (parameter_count(reward_model.path) / GIB * type_bytes if reward_model.path else 0.0), 0.0
    cache, engines = config.rollout.kv_cache_gib, config.rollout.engines_per_gpu if on_gpu else 1
    if on_gpu and device_gib is not None and cache is None:
        return config.rollout.gpu_memory_utilization * device_gib, 0.0
    # On CPU all ranks of an engine are on one node.
    split = config.rollout.tensor_parallel if on_gpu else 1
    return engines * (size * width / split + (cache or 0.5)), 0.0


def plan(found: Sequence[Share]) -> list[str]:
    """The plan as a table, a line per rank of a role: role, node, device, GiB."""
    lines = [("role", "node", "device", "GiB, activations aside")]
    lines += [(s.role, s.slot.node.address, f"{s.slot.device} {s.slot.rank}", f"{s.gib:.2f}") for s in found]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def check_fit(
    found: Sequence[Share], device_gib: float | None, others: Iterable[tuple[str, Sequence[Share]]] = ()
) -> None:
    """Raises ConfigError if the roles on a device need more memory than it has; does nothing if its size is unknown.

    `others` lists other settings with their shares: the error suggests the first that fit.
    """
    if device_gib is None:
        return
    device, needed = max(_needed(found).items(), key=lambda item: item[1])
    if needed <= device_gib:
        return
    own = [share for share in found if (share.slot.node.address, share.slot.rank) == device]
    parts = ", ".join(f"{share.role} {share.gib:.1f}" for share in own)
    hint = "use more devices, give roles devices of their own with device_mapping.ROLE, or take a smaller model"
    for settings, shared in others:
        if (then := max(_needed(shared).values())) <= device_gib:
            hint = f"set {settings}: then {then:.1f} GiB are needed, activations aside"
            break
    raise ConfigError(
        f"{own[0].slot.device} {device[1]} of {device[0]} has {device_gib:.1f} GiB, "
        f"{needed - device_gib:.1f} less than the {needed:.1f} that are needed: {parts}",
        hint=hint,
    )


def _needed(found: Sequence[Share]) -> dict[tuple[str, int], float]:
    """GiB that each device needs, by node and rank."""
    by_device: dict[tuple[str, int], list[Share]] = defaultdict(list)
    for share in found:
        by_device[share.slot.node.address, share.slot.rank].append(share)
    # Offloaded memory is on the device for one role at a time.
    return {
        device: sum(share.gib - share.offloaded_gib for share in own) + max(share.offloaded_gib for share in own)
        for device, own in by_device.items()
    }


def alternatives(
    config: Config, placement: Mapping[str, Sequence[Slot]], device_gib: float | None
) -> Iterator[tuple[str, list[Share]]]:
    """Settings that save memory, cumulatively, and the resulting shares."""
    savings: list[dict[str, float | bool]] = [
        {f"{role}.sharding.optimizer_offload": True for role in config.trained},
        {f"{role}.sharding.param_offload": True for role in config.trained},
        {"reference.param_offload": True},
    ]
    if config.rollout.kv_cache_gib is None and config.rollout.gpu_memory_utilization > LEAST_FOR_ENGINES:
        savings.insert(0, {"rollout.gpu_memory_utilization": LEAST_FOR_ENGINES})
    settings: dict[str, float | bool] = {}
    for saving in savings:
        settings |= saving
        for key, value in saving.items():
            config = _with(config, key, value)
        text = " ".join(f"{key}={str(value).lower()}" for key, value in settings.items())
        yield text, shares(config, placement, device_gib)


def _with(section: Section, key: str, value: float | bool) -> Section:
    """A copy of a settings section with a new value at a key such as actor.sharding.param_offload."""
    name, _, rest = key.partition(".")
    inner = _with(getattr(section, name), rest, value) if rest else value
    return section.model_copy(update={name: inner})


def device_memory(device: str) -> float | None:
    """GiB of this node's first device, assumed for all devices; None if unknown."""
    if device == "cpu":
        return float(psutil.virtual_memory().total / GIB)
    try:
        import pynvml
    except ImportError:  # AMD, or an image without it
        return None
    try:
        pynvml.nvmlInit()
        return float(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).total / GIB)
    except pynvml.NVMLError:
        return None
