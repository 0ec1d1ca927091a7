"""Settings of GPU runs that follow from model, lengths and memory, where the user gave none.

A choice changes memory and speed; results change only by the order in which numbers are added. Each states its reason;
`trainer plan` shows them all.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from operator import attrgetter

from trainer.config.tree import WorkersConfig
from trainer.errors import DataError
from trainer.models.networks import check_context_parallel
from trainer.planning.activations import bytes_per_token, gathered_bytes, pass_bytes
from trainer.planning.expert_traffic import WORTH, received_bytes, sizes_that_fit
from trainer.planning.memory import (
    GIB,
    GRAPHS_GIB,
    TYPE_BYTES,
    Share,
    away_gib,
    by_device,
    copied_gib,
    model_of,
    offloaded_gib,
    settings_of,
    shares,
    size_of,
    with_setting,
)
from trainer.planning.model_size import ModelSize
from trainer.planning.placement import Placement, engine_slots
from trainer.rollout.vllm.settings import GRAPHS, graph_size

# Of a GPU's memory, the share that choices may fill: estimates are within a tenth, and fragments take the rest.
FILLED = 0.9
# Beyond these sizes micro-batches were not faster on H200s: matrix products fill the GPU
# (benchmarks/measured/training.md).
TOKENS, TOKENS_OF_A_SMALL_MODEL = 16384, 32768
SMALL = 1_000_000_000  # parameters
# With fewer tokens in a micro-batch, computing activations again costs less than small matrix products.
FEW_TOKENS = 4096
# What ranks do for each micro-batch, or once per update where each has room for the whole network; and the settings
# that leave nothing to choose.
TRAFFIC = {
    "resharding_interval": ("weights stay gathered during a pass", {"resharding_interval", "reshard_after_forward"}),
    "gradient_sync_interval": ("gradients are averaged once in an update", {"gradient_sync_interval"}),
}
# The cache is larger than the responses by this factor, because its blocks are not full.
SPARE = 1.05
# Validation sends all its prompts at once, often more than a small step has responses.
SEQUENCES_OF_VALIDATION = 64


@dataclass(frozen=True)
class Choice:
    """A setting, its value and why."""

    key: str
    value: int | float | bool
    reason: str

    def __str__(self) -> str:
        value = str(self.value).lower() if isinstance(self.value, bool) else f"{self.value:g}"
        return f"{self.key}={value}: {self.reason}"


def with_choices(config: WorkersConfig, placement: Placement) -> tuple[WorkersConfig, list[Choice]]:
    """The settings with a value for each that was not given, and the choices: none on CPU, or if the memory of a GPU
    is unknown."""
    made: list[Choice] = []
    size = ModelSize.read(config.model.directory)
    unknown = any(slot.node.device_gib is None for slots in placement.values() for slot in slots)
    if placement["actor"][0].device == "cpu" or unknown or size is None:
        return config, made
    roles = ("actor", "critic")
    steps: list[Callable[[_Machine], Iterator[Choice]]] = [partial(_experts_for_room, role=role) for role in roles]
    steps.append(_offload)
    steps += [partial(_context, role=role) for role in roles]
    steps.append(_offload)  # what did not suffice for whole rows may do for a part of each
    if "rollout" in placement:
        steps += [_sequences, _cache]
    steps += [partial(_passes, role=role) for role in roles]
    steps += [partial(_experts_for_traffic, role=role) for role in roles]
    steps += [partial(_traffic, role=role, key=key) for key in TRAFFIC for role in roles]
    for step in steps:
        for choice in step(_Machine(config, placement, size)):
            config = with_setting(config, choice.key, choice.value)
            made.append(choice)
    return config, made


@dataclass(frozen=True)
class _Machine:
    """What a choice depends on: the settings so far, and the devices. `size` is that of the actor's model."""

    config: WorkersConfig
    placement: Placement
    size: ModelSize

    @property
    def shares(self) -> list[Share]:
        return shares(self.config, self.placement)

    @property
    def type_bytes(self) -> int:
        return TYPE_BYTES[self.config.model.dtype_on("cuda")]

    @property
    def row(self) -> int:
        """Tokens of the longest row."""
        return sum(self.config.longest_row)

    def row_of_rank(self, role: str) -> int:
        """Tokens of the longest row that a rank of the role computes."""
        return math.ceil(self.row / settings_of(self.config, role).sharding.context_parallel)

    def shared_row_of_rank(self, role: str) -> int:
        """The same for a prompt with several responses, as far as sharing it saves a fifth of the tokens or more."""
        settings, (prompt, response) = settings_of(self.config, role), self.config.longest_row
        samples = self.config.rollout.samples_per_prompt if "rollout" in self.placement else 1
        together = min(prompt + samples * response, 4 * prompt) if settings.share_prompts else 0
        return math.ceil(together / settings.sharding.context_parallel)

    def passes_room(self, role: str) -> float:
        """GiB for the activations of a pass of the role on its fullest device."""
        settings, size, slots = settings_of(self.config, role), size_of(self.config, role), self.placement[role]
        assert size is not None
        fixed = pass_bytes(size, settings, self.type_bytes, len(slots), tokens=0) / GIB
        working = next(share.working for share in self.shares if share.role == role)
        away = away_gib(self.config, role, len(slots), slots[0].device)
        return self.room(role) - working + away - fixed

    def fitting(self, role: str, checkpointing: bool) -> int:
        """Tokens of a micro-batch for which a rank of the role has room."""
        settings, size = settings_of(self.config, role), size_of(self.config, role)
        assert size is not None
        needed = bytes_per_token(size, settings, self.type_bytes, checkpointing)
        return max(0, int(self.passes_room(role) * GIB / needed))

    def chooses_passes(self, role: str) -> bool:
        """Whether the micro-batches of a role are left to choose."""
        given = settings_of(self.config, role).model_fields_set & {"micro_batch_size", "micro_batch_tokens"}
        return role in self.placement and size_of(self.config, role) is not None and not given

    def sharded_alike(self, role: str) -> list[str]:
        """The roles whose ranks are divided by the settings of this one."""
        settings = settings_of(self.config, role)
        sharded = (like for like in self.placement if like not in ("rollout", "reward"))
        return [like for like in sharded if settings_of(self.config, like) is settings]

    @property
    def rows_fit(self) -> bool:
        """Whether each role has room for a row in a pass, if it computes activations again, and for some tokens."""
        return all(self.role_fits(role) for role in self.config.trained if self.chooses_passes(role))

    def role_fits(self, role: str) -> bool:
        """The same for one role."""
        return self.fitting(role, checkpointing=True) >= max(self.row_of_rank(role), FEW_TOKENS)

    @property
    def nodes_hold_offload(self) -> bool:
        """Whether each node whose memory is known has room for what its ranks offload."""
        offloaded = offloaded_gib(self.config, self.placement).items()
        return all(node.node_gib is None or gib <= FILLED * node.node_gib for node, gib in offloaded)

    def dividing_experts(self, role: str) -> list[int]:
        """The numbers of ranks that may divide the experts of a role, if that is left to choose: of all models whose
        ranks are divided like this role's."""
        if role not in self.placement:
            return []
        settings, alike = settings_of(self.config, role), self.sharded_alike(role)
        sharding = settings.sharding
        if "expert_parallel" in sharding.model_fields_set or settings.backend != "fsdp" or sharding.tensor_parallel > 1:
            return []
        if not isinstance(sharding.reshard_after_forward, bool):
            return []
        fitting: list[set[int]] = []
        for like in alike:
            size, slots = size_of(self.config, like), self.placement[like]
            if size is None or size.experts is None:
                return []
            copy = sharding.shard_size or len(slots)
            on_nodes = Counter(slot.node.id for slot in slots).values()
            fitting += (set(sizes_that_fit(size.experts, size, len(slots), copy, count)) for count in on_nodes)
        return sorted(set.intersection(*fitting))

    @property
    def responses_per_engine(self) -> int:
        """Responses that an engine has at a time."""
        engines = len(engine_slots(self.config, self.placement["rollout"])) * self.config.rollout.engines_per_gpu
        return math.ceil(self.steps_in_flight * self.config.responses / engines)

    @property
    def steps_in_flight(self) -> int:
        """Steps whose responses the engines sample at a time."""
        trainer = self.config.trainer
        return 1 + math.ceil(trainer.max_staleness) if trainer.mode == "asynchronous" else 1

    @property
    def token_gib(self) -> float:
        """GiB of an engine's cache, on each of its GPUs, for a token."""
        # With more GPUs than heads of keys and values, vLLM copies the heads.
        split = min(self.config.rollout.tensor_parallel, self.size.key_value_heads)
        return self.size.key_values * self.type_bytes / split / GIB

    @property
    def free(self) -> float:
        """GiB for the cache of each engine of a GPU."""
        rollout = self.config.rollout
        room = self.room("rollout") - copied_gib(self.config, self.placement)
        weights = self.size.parameters * self.type_bytes / rollout.tensor_parallel / GIB
        return room / rollout.engines_per_gpu - weights - GRAPHS_GIB

    def room(self, role: str) -> float:
        """GiB that a turn of the role may take on its fullest device."""
        rooms = []
        for on_device in by_device(self.shares):
            device_gib = on_device[0].slot.node.device_gib
            assert device_gib is not None  # else there are no choices
            if role in {share.role for share in on_device}:
                rooms.append(FILLED * device_gib - _resting(on_device))
        return min(rooms)


def _resting(on_device: list[Share]) -> float:
    """GiB that stay on a device beside a turn. Engines that have it to themselves count as a turn, even awake."""
    alone = {share.role for share in on_device if share.resting or share.working} == {"rollout"}
    return sum(share.processes if alone else share.resting for share in on_device)


def _sequences(machine: _Machine) -> Iterator[Choice]:
    if "max_num_seqs" in machine.config.rollout.model_fields_set:
        return
    chosen, steps = machine.responses_per_engine, machine.steps_in_flight
    reason = f"an engine has {chosen:,} responses in " + ("a step" if steps == 1 else f"{steps} steps at a time")
    if machine.config.data.validation_files and chosen < SEQUENCES_OF_VALIDATION:
        chosen = SEQUENCES_OF_VALIDATION
        reason += ", and validation sends all its prompts at once"
    if (rounded := graph_size(chosen)) != chosen:
        reason += ", rounded up to the size of a CUDA graph"
    yield Choice("rollout.max_num_seqs", min(rounded, GRAPHS), reason)


def _cache(machine: _Machine) -> Iterator[Choice]:
    rollout, token_gib = machine.config.rollout, machine.token_gib
    if rollout.model_fields_set & {"kv_cache_gib", "gpu_memory_utilization"} or rollout.engine == "transformers":
        return
    free = machine.free
    if free < machine.row * token_gib:
        return  # the check of the plan says what is missing
    at_once = min(rollout.max_num_seqs, machine.responses_per_engine)
    prompts = math.ceil(at_once / rollout.samples_per_prompt) if rollout.prefix_caching else at_once
    data = machine.config.data
    wanted = SPARE * (at_once * data.max_response_length + prompts * data.max_prompt_length) * token_gib
    held = f"all {at_once:,}" if wanted <= free else f"{int(free / wanted * at_once):,} of {at_once:,}"
    reason = f"it holds {held} responses at their full length; {free:.1f} GiB are free"
    yield Choice("rollout.kv_cache_gib", _rounded(min(wanted, free)), reason)


def _context(machine: _Machine, role: str) -> Iterator[Choice]:
    """Ranks that share the longest row, if it has no room on one: preferably without computing activations again, which
    costs more than the exchange of heads."""
    if not machine.chooses_passes(role):
        return
    config, row, settings = machine.config, machine.row, settings_of(machine.config, role)
    split, alike = settings.sharding.tensor_parallel, machine.sharded_alike(role)
    on_nodes = [n for like in alike for n in Counter(slot.node.id for slot in machine.placement[like]).values()]
    if "context_parallel" in settings.sharding.model_fields_set or settings.backend != "fsdp":
        return
    from trainer.models.pretrained import empty_language_model  # takes seconds, and few runs need it

    load = cache(empty_language_model)
    given = "activation_checkpointing" in settings.model_fields_set
    for checkpointing in (settings.activation_checkpointing,) if given else (False, True):
        fits = machine.fitting(role, checkpointing)
        if fits >= row:
            return
        for ranks in range(2, min(on_nodes) // split + 1):
            if fits < max(math.ceil(row / ranks), FEW_TOKENS) or any(n % (ranks * split) for n in on_nodes):
                continue
            with suppress(DataError):  # another size may divide the heads
                for model in {model_of(config, like) for like in alike}:
                    check_context_parallel(load(model), role, ranks, split)
                reason = f"a row may have {row:,} tokens, and a GPU has room for {fits:,}"
                reason += "" if checkpointing else " without computing activations again"
                yield Choice(f"{role}.sharding.context_parallel", ranks, reason)
                return


def _experts_for_room(machine: _Machine, role: str) -> Iterator[Choice]:
    if role not in machine.placement or not machine.chooses_passes(role) or machine.role_fits(role):
        return
    key = f"{role}.sharding.expert_parallel"
    for ranks in machine.dividing_experts(role):
        if replace(machine, config=with_setting(machine.config, key, ranks)).role_fits(role):
            yield Choice(key, ranks, "a pass that gathers all experts of a layer has no room for the longest row")
            return


def _experts_for_traffic(machine: _Machine, role: str) -> Iterator[Choice]:
    if not (sizes := machine.dividing_experts(role)):
        return
    settings, size, ranks = (
        settings_of(machine.config, role),
        size_of(machine.config, role),
        len(machine.placement[role]),
    )
    tokens = settings.micro_batch_tokens
    if size is None or tokens is None or settings.sharding.expert_parallel > 1:
        return
    received = {
        parts: received_bytes(
            size, with_setting(settings, "sharding.expert_parallel", parts), machine.type_bytes, ranks, tokens
        )
        / GIB
        for parts in (1, *sizes)
    }
    best = min(sizes, key=received.__getitem__)
    if received[1] > WORTH * received[best]:
        reason = (
            f"for a micro-batch a rank receives {received[best]:.0f} GiB of tokens and experts, and "
            f"{received[1]:.0f} if it gathers all experts"
        )
        yield Choice(f"{role}.sharding.expert_parallel", best, reason)


def _offload(machine: _Machine) -> Iterator[Choice]:
    if machine.rows_fit:
        return
    for saving, offloaded in _offloads(machine):
        if offloaded.rows_fit and offloaded.nodes_hold_offload:
            reason = f"without it a pass has no room for the longest row, or not for {FEW_TOKENS:,} tokens"
            yield from (Choice(key, True, reason) for key in saving)
            return


def _offloads(machine: _Machine) -> Iterator[tuple[list[str], _Machine]]:
    """Settings that were not given and leave more room to passes, those that cost least first, and what they leave."""
    config = machine.config
    reference = ["reference.param_offload"] if "reference" in machine.placement else []
    states = [f"{role}.sharding.optimizer_offload" for role, section in config.trained.items() if not section.lora.rank]
    weights = [f"{role}.sharding.param_offload" for role in config.trained]
    for saving in (reference, states, reference + states, reference + states + weights):
        left = [key for key in saving if not _is_given(config, key)]
        changed = config
        for key in left:
            changed = with_setting(changed, key, True)
        yield left, replace(machine, config=changed)


def _is_given(config: WorkersConfig, key: str) -> bool:
    section, _, name = key.rpartition(".")
    return name in attrgetter(section)(config).model_fields_set


def _passes(machine: _Machine, role: str) -> Iterator[Choice]:
    if not machine.chooses_passes(role):
        return
    settings, size = settings_of(machine.config, role), size_of(machine.config, role)
    assert size is not None
    room, row = max(0.0, machine.passes_room(role)), machine.row_of_rank(role)
    checkpointing, without = settings.activation_checkpointing, machine.fitting(role, checkpointing=False)
    if "activation_checkpointing" not in settings.model_fields_set and without < max(row, FEW_TOKENS):
        checkpointing = True
        reason = f"without it {without:,} tokens fit into a micro-batch, and a row may have {row:,}"
        yield Choice(f"{role}.activation_checkpointing", True, reason)
    fits, shared = machine.fitting(role, checkpointing), machine.shared_row_of_rank(role)
    fast = max(row, TOKENS_OF_A_SMALL_MODEL if 0 < size.parameters < SMALL else TOKENS)
    most = max(fast, shared)
    reason = f"{fits:,} fit into {room:.1f} GiB"
    if fits > most:
        reason += f", more than {most:,} are not faster"
    if shared > fast:
        reason += "; responses share a long prompt in a micro-batch"
    yield Choice(f"{role}.micro_batch_tokens", max(row, min(most, fits // 1024 * 1024)), reason)


def _traffic(machine: _Machine, role: str, key: str) -> Iterator[Choice]:
    config, (kept, deciding) = machine.config, TRAFFIC[key]
    settings = settings_of(config, role)
    sharding, size, tokens = settings.sharding, size_of(config, role), settings.micro_batch_tokens
    ranks = len(machine.placement.get(role, ()))
    averaging = ranks // sharding.tensor_parallel
    if averaging <= 1 or size is None or tokens is None or sharding.model_fields_set & deciding:
        return
    most = math.ceil(settings.mini_batch_size * machine.row / averaging / tokens)
    once = with_setting(settings, f"sharding.{key}", most)
    before, after = (gathered_bytes(size, options, machine.type_bytes, ranks) / GIB for options in (settings, once))
    # A reference or teacher is sharded like the actor, maybe on devices of its own.
    alike = {role} | ({"reference", "teacher"} & machine.placement.keys() if role == "actor" else set())
    turns = {share.role: share.working + share.passes for share in machine.shares}
    room = min(machine.room(other) - turns[other] for other in alike)
    if most > 1 and after - before <= room:
        reason = f"{kept}, which takes {after - before:.1f} of {room:.1f} GiB left"
        yield Choice(f"{role}.sharding.{key}", most, reason)


def _rounded(gib: float) -> float:
    """Down to a tenth of a GiB, or to two digits below one."""
    return math.floor(gib * 10) / 10 if gib >= 1 else float(f"{gib:.2g}")
