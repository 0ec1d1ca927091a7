"""Keys of verl's asynchronous trainers: `trainer.v1`, and the entry points of one_step_off_policy and
fully_async_policy.

verl trains on responses as they finish, ours in the order in which their prompts were drawn: so a step has the same
prompts whatever their length, and no response grows so old that it must be dropped. One of our steps is what verl
trains between two transfers of weights.
"""

from trainer.compat.verl.rules import (
    Given,
    Rule,
    Translation,
    Value,
    is_true,
    no_effect,
    no_effects,
    only,
    unsupported,
    whole,
    word,
)
from trainer.compat.verl.shared import ACTOR, ROLLOUT
from trainer.errors import ConfigError

_V1, _ASYNC = "trainer.v1", "async_training"
_SIZE_OF_A_NODE = 8
_IN_ORDER = "responses train in the order of their prompts, so none exceeds trainer.max_staleness and none is dropped"
_GPU_KEYS = ("nnodes", "n_gpus_per_node")
_TRAINERS = ("actor", "critic", "reference", "teacher", "reward")


def _v1_mode(given: Given) -> str:
    if word(given.get("trainer.use_v1", True)) == "false":
        return "sync"
    return word(given.get(f"{_V1}.trainer_mode", "sync"))


def asynchronous(given: Given) -> bool:
    """Whether the run samples for later steps while it trains."""
    return _v1_mode(given) != "sync" or word(given.get("trainer.mode", "synchronous")) != "synchronous"


def _number(key: str, given: Given, default: int) -> int:
    value = given.get(key, default)
    number = whole(value)
    if number is None or number < 1:
        raise ConfigError(f"{key}={value}: expected a whole number above 0", hint="it counts batches, nodes or GPUs")
    return number


def updates_per_step(given: Given) -> int:
    """verl's updates between two transfers of weights, each with a learning rate of its own; 1 in synchronous runs."""
    key = f"{_ASYNC}.trigger_parameter_sync_step"
    return _number(key, given, 1) if key in given and asynchronous(given) else 1


def trainer_mode(key: str, value: Value, given: Given) -> Translation:
    modes = ("sync", "colocate_async", "separate_async")
    if word(value) not in modes:
        raise unsupported(key, value, modes)
    mode = _v1_mode(given)
    if mode == "sync":
        return Translation({})
    if mode == "separate_async":
        _check_parts(given)
    settings: dict[str, Value] = {
        "trainer.mode": "asynchronous",
        "trainer.max_staleness": _number(f"{_V1}.{mode}.num_warmup_batches", given, 1),
    }
    # Without rollout_correction, verl learns from older weights uncorrected.
    return Translation(settings, f"{key}={mode}: {_IN_ORDER}", inherited={"algorithm.correction": "none"})


def _check_parts(given: Given) -> None:
    """verl's step consists of `parameter_sync_step` mini-batches, between which weights stay with the trainer."""
    key = f"{_V1}.separate_async.parameter_sync_step"
    parts, batch = _number(key, given, 4), _number("data.train_batch_size", given, 1024)
    prompts = _number(f"{ACTOR}.ppo_mini_batch_size", given, 256)
    if parts * prompts != batch:
        raise ConfigError(
            f"{key}={parts} mini-batches of {prompts} prompts are not data.train_batch_size={batch}",
            hint=f"set data.train_batch_size={parts * prompts}, or {ACTOR}.ppo_mini_batch_size",
        )


def of_mode(mode: str, rule: Rule) -> Rule:
    """A rule that applies in one of the modes of `trainer.v1`."""

    def of_this_mode(key: str, value: Value, given: Given) -> Translation:
        if _v1_mode(given) == mode:
            return rule(key, value, given)
        return Translation({}, f"{key} has no effect: {_V1}.trainer_mode is not {mode}", ignored=True)

    return of_this_mode


def read_with_the_mode(_key: str, _value: Value, _given: Given) -> Translation:
    return Translation({})


def engine_gpus(section: str) -> Rule:
    """The engines' own nodes and GPUs, beside those of the trainers in `trainer`."""

    def rule(key: str, _value: Value, given: Given) -> Translation:
        shared = _v1_mode(given) == "colocate_async" or word(given.get(f"{section}.nnodes", 0)) == "0"
        if shared or not asynchronous(given):
            return Translation({}, f"{key} has no effect: engines and trainers share their GPUs", ignored=True)
        if "device_mapping.rollout" in given:
            return Translation({})
        return Translation({}, computed=_devices(section, given))

    return rule


def _devices(section: str, given: Given) -> dict[str, Value]:
    """Trainers and engines side by side on each node if there are enough GPUs, else on nodes of their own."""
    nodes, gpus = _number("trainer.nnodes", given, 1), _number("trainer.n_gpus_per_node", given, _SIZE_OF_A_NODE)
    own_nodes = _number(f"{section}.nnodes", given, 1)
    own_gpus = _number(f"{section}.n_gpus_per_node", given, _SIZE_OF_A_NODE)
    if nodes == own_nodes and gpus + own_gpus <= _SIZE_OF_A_NODE:
        training, sampling = _mapping(range(nodes), range(gpus)), _mapping(range(nodes), range(gpus, gpus + own_gpus))
        size, count = gpus + own_gpus, nodes
    else:
        training = _mapping(range(nodes), range(gpus))
        sampling = _mapping(range(nodes, nodes + own_nodes), range(own_gpus))
        size, count = max(gpus, own_gpus), nodes + own_nodes
    return {
        "trainer.nnodes": count,
        "trainer.n_gpus_per_node": size,
        **{f"device_mapping.{role}": training for role in _TRAINERS},
        "device_mapping.rollout": sampling,
    }


def _mapping(nodes: range, gpus: range) -> str:
    listed = ",".join(map(str, gpus))
    return ";".join(f"node{node}:{listed}" for node in nodes)


def hybrid_engine(key: str, value: Value, given: Given) -> Translation:
    return Translation({}) if asynchronous(given) else only("true")(key, value, given)


def of_fully_async(rule: Rule) -> Rule:
    """A rule for a key that only fully_async_policy and its relatives have."""

    def in_mode(key: str, value: Value, given: Given) -> Translation:
        if asynchronous(given):
            return rule(key, value, given)
        raise ConfigError(
            f"{key} belongs to verl's fully_async_policy", hint="start from --config=verl_fully_async, or leave it out"
        )

    return in_mode


def _prompts_per_step(given: Given) -> int:
    batches = updates_per_step(given) * _number(f"{_ASYNC}.require_batches", given, 1)
    return batches * _number(f"{ACTOR}.ppo_mini_batch_size", given, 256)


def transfer_frequency(key: str, _value: Value, given: Given) -> Translation:
    batch = _prompts_per_step(given)
    note = f"{key}: a step trains the {batch} prompts between two transfers of weights; {_IN_ORDER}"
    return Translation({}, note, computed={"data.train_batch_size": batch})


def staleness(_key: str, value: Value, _given: Given) -> Translation:
    return Translation({"trainer.max_staleness": value})


def partial_rollout(key: str, value: Value, given: Given) -> Translation:
    """Without it, responses finish under the weights with which they began."""
    if word(value) not in ("true", "false"):
        raise unsupported(key, value, ("true", "false"))
    return Translation({} if is_true(value) else {"rollout.segment_length": given.get("data.max_response_length", 512)})


def total_prompts(key: str, value: Value, given: Given) -> Translation:
    if word(value) == "null":
        return Translation({})
    total, batch = _number(key, given, 1), _prompts_per_step(given)
    if total < batch:
        raise ConfigError(
            f"{key}={total} prompts are less than the {batch} of a step", hint="raise it, or train fewer per step"
        )
    return Translation({}, computed={"trainer.total_steps": total // batch})


def overriding(ours: str) -> Rule:
    """Our setting, whatever verl's section `trainer` says."""
    return lambda _key, value, _given: Translation({}, computed={ours: value})


_HYBRID = f"{_V1}.separate_async.hybrid_rollout"
_WHILE_IDLE = "engines keep their GPUs, and trainers theirs"
RULES: dict[str, Rule] = {
    "trainer.use_v1": only("true", "false"),
    f"{_V1}.trainer_mode": trainer_mode,
    f"{_V1}.colocate_async.num_warmup_batches": of_mode("colocate_async", read_with_the_mode),
    f"{_V1}.separate_async.num_warmup_batches": of_mode("separate_async", read_with_the_mode),
    f"{_V1}.separate_async.parameter_sync_step": of_mode("separate_async", read_with_the_mode),
    **no_effects(
        _HYBRID,
        (
            *("enable_switch", "switch_threshold_ratio", "adaptive_switch_threshold", "switch_threshold_step_up"),
            *("switch_threshold_step_down", "switch_threshold_release_steps", "switch_cost_window_size"),
        ),
        _WHILE_IDLE,
    ),
    **no_effects(f"{_V1}.sampler", ("max_off_policy_threshold", "max_off_policy_strategy"), _IN_ORDER),
    **{f"{section}.{name}": engine_gpus(section) for section in ("rollout", ROLLOUT) for name in _GPU_KEYS},
    "actor_rollout_ref.hybrid_engine": hybrid_engine,
    f"{_ASYNC}.trigger_parameter_sync_step": of_fully_async(transfer_frequency),
    f"{_ASYNC}.require_batches": of_fully_async(read_with_the_mode),
    f"{_ASYNC}.staleness_threshold": of_fully_async(staleness),
    f"{_ASYNC}.partial_rollout": of_fully_async(partial_rollout),
    f"{_ASYNC}.use_rollout_log_probs": of_fully_async(only("true")),
    f"{_ASYNC}.compute_prox_log_prob": of_fully_async(read_with_the_mode),
    **no_effects(
        _ASYNC, ("use_trainer_do_validate", "enable_reward_queue"), "engines validate, rewards have processes"
    ),
    **no_effects(
        _ASYNC,
        (
            *("use_dynamic_resource_scheduling", "dynamic_schedule_policy", "dynamic_schedule_deactivate_ratio"),
            "dynamic_schedule_enable_rebalance",
        ),
        _WHILE_IDLE,
    ),
    f"{_ASYNC}.concurrent_samples_per_replica": no_effect("see rollout.max_num_seqs"),
    f"{_ASYNC}.checkpoint_engine.*": no_effect("see rollout.weight_transfer"),
    "rollout.total_rollout_steps": of_fully_async(total_prompts),
    "rollout.test_freq": of_fully_async(overriding("trainer.test_freq")),
    "rollout.total_epochs": of_fully_async(overriding("trainer.total_epochs")),
    "rollout.n": no_effect(f"{ROLLOUT}.n counts the responses to a prompt"),
}
