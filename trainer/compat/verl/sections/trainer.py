"""Keys of verl's section `trainer`, and of its profiler and Ray."""

from collections.abc import Sequence

from trainer.compat.verl.rules import (
    Given,
    Rule,
    Translation,
    Value,
    no_effect,
    no_effects,
    only,
    refused,
    to,
    unsupported,
    whole,
    word,
)
from trainer.compat.verl.shared import PROFILER_KEYS, TRACES
from trainer.compat.verl.subsections.groups import ACTOR_ROLE, CRITIC_ROLE, strategy
from trainer.errors import ConfigError
from trainer.rows import module_names

ALWAYS_RECORDED = ("console", "tensorboard", "file")
_OBJECT_STORE = "batches go through Ray's object store"
_INSTALLING = ("pip", "uv", "conda", "working_dir", "py_modules", "container", "image_uri")
_RESUME_MODES = ("disable", "auto", "resume_path")
_RESUME_PATH = "trainer.resume_from_path"


def loggers(key: str, value: Value, _given: Given) -> Translation:
    """Console, metrics.jsonl and TensorBoard always record; `trainer.loggers` names the others."""
    listed = value if isinstance(value, list) else str(value).split(",")
    names = [word(name).strip() for name in listed]
    supported = (*ALWAYS_RECORDED, *module_names("records/loggers"))
    for name in names:
        if name not in supported:
            raise unsupported(key, name, supported)
    return Translation({"trainer.loggers": [name for name in names if name not in ALWAYS_RECORDED]})


def checkpoints_to_keep(key: str, value: Value, given: Given) -> Translation:
    """A checkpoint holds actor and critic, so the larger of verl's two numbers counts; 0 or less keeps all."""
    values = [given.get(f"trainer.max_{role}_ckpt_to_keep", value) for role in ("actor", "critic")]
    numbers = [0 if word(limit) in ("null", "none") else whole(limit) for limit in values]
    known = [number for number in numbers if number is not None]
    if len(known) < len(numbers):
        raise ConfigError(f"{key}={value}: expected a whole number or null", hint="it counts checkpoints to keep")
    return Translation({"trainer.keep_checkpoints": max(known) if min(known) > 0 else None})


def experiment(_key: str, value: Value, _given: Given) -> Translation:
    """The run's name. verl continues a run of the same name unless `resume_mode` says otherwise."""
    return Translation({"trainer.run_id": value}, inherited={} if word(value) == "null" else {"trainer.resume": "auto"})


def resume_mode(path_with: Sequence[str]) -> Rule:
    """`path_with`: the modes in which `resume_from_path` counts."""

    def rule(key: str, value: Value, given: Given) -> Translation:
        mode = word(value)
        if mode not in _RESUME_MODES:
            raise unsupported(key, value, _RESUME_MODES)
        if mode == "disable":
            return Translation({"trainer.resume": None})
        if mode in path_with and not _unset(given.get(_RESUME_PATH)):
            return Translation({"trainer.resume": given[_RESUME_PATH]})
        if mode == "resume_path":
            raise ConfigError(f"{key}=resume_path needs a checkpoint", hint=f"set {_RESUME_PATH}, or {key}=auto")
        if "trainer.experiment_name" in given or "trainer.run_id" in given:
            return Translation({"trainer.resume": "auto"})
        return Translation({}, f"{key}=auto has no effect: a run without trainer.experiment_name is always a new one")

    return rule


def resume_from_path(path_with: Sequence[str]) -> Rule:
    """A path that counts in the modes `path_with`; verl's mode is auto if it is not given."""

    def rule(key: str, value: Value, given: Given) -> Translation:
        if _unset(value):
            return Translation({})
        if word(given.get("trainer.resume_mode", "auto")) in path_with:
            return Translation({"trainer.resume": value})
        return Translation({}, f"{key} has no effect: trainer.resume_mode is not {' or '.join(path_with)}")

    return rule


def _unset(path: Value) -> bool:
    return word(path) in ("null", "none", "")


def resume_rules(*path_with: str) -> dict[str, Rule]:
    return {"trainer.resume_mode": resume_mode(path_with), _RESUME_PATH: resume_from_path(path_with)}


def engine(key: str, value: Value, given: Given) -> Translation:
    """The training engine of every role; a role's `strategy` overrides it."""
    roles = [role for role in (ACTOR_ROLE, CRITIC_ROLE) if f"{role.theirs}.strategy" not in given]
    translations = [strategy(role)(key, value, given) for role in roles]
    inherited = {ours: chosen for translation in translations for ours, chosen in translation.inherited.items()}
    return Translation({}, next((translation.note for translation in translations), ""), inherited=inherited)


def save_freq(_key: str, value: Value, given: Given) -> Translation:
    """verl's -1 means no checkpoints. Here a run then saves at its end, at SIGTERM and when it fails, not by time."""
    by_time = {} if word(value) != "-1" or "trainer.save_minutes" in given else {"trainer.save_minutes": 0}
    return Translation({"trainer.save_freq": value, **by_time})


def exported(key: str, value: Value, _given: Given) -> Translation:
    """A variable for Ray's processes, which here have those of `launch`. Its value may be a secret."""
    if word(value) in ("null", "{}"):
        return Translation({})
    name = key.rpartition(".")[2]
    raise ConfigError(
        f"{key} is not supported here",
        hint=f"export {name}=VALUE before launch; a reward function sees it with reward.variables=[{name}]",
    )


def ray_rules(section: str) -> dict[str, Rule]:
    """Arguments of `ray.init`. What a runtime environment adds to Ray's processes is in the image, or is exported."""
    environment = f"{section}.runtime_env"
    installed = refused("install packages in the image, and put your modules on PYTHONPATH")
    return {
        f"{environment}.env_vars.TRANSFER_QUEUE_ENABLE": no_effect(_OBJECT_STORE),
        **{f"{environment}.env_vars{below}": exported for below in ("", ".*")},
        **{f"{environment}.{name}{below}": installed for name in _INSTALLING for below in ("", ".*")},
        f"{section}.*": no_effect("`launch` starts and sizes Ray"),
    }


SAME_NAMES: dict[str, Rule] = {"trainer.save_freq": save_freq}
"""Keys that verl and this trainer share, but whose values differ. They count for a line that has other keys of verl."""

RULES: dict[str, Rule] = {
    "trainer.total_training_steps": to("trainer.total_steps"),
    "trainer.default_local_dir": to("trainer.output_dir"),
    "trainer.experiment_name": experiment,
    "trainer.logger": loggers,
    **resume_rules("resume_path"),
    "trainer.val_before_train": to("trainer.test_before_training"),
    "transfer_queue.enable": no_effect(_OBJECT_STORE),
    "trainer.val_only": to("trainer.validate_only"),
    "trainer.balance_batch": no_effect("ranks always get about the same number of tokens"),
    "trainer.log_val_generations": no_effect(
        "every response of a validation is recorded: `trainer samples RUN --validation`"
    ),
    "trainer.rollout_data_dir": to("trainer.trajectories.dir"),
    "trainer.validation_data_dir": to("trainer.trajectories.validation_dir"),
    "trainer.default_hdfs_dir": only("null"),
    "trainer.device": only("cuda", "gpu", "null"),
    "trainer.ray_wait_register_center_timeout": to("trainer.worker_timeout"),
    "trainer.max_actor_ckpt_to_keep": checkpoints_to_keep,
    "trainer.max_critic_ckpt_to_keep": checkpoints_to_keep,
    "trainer.del_local_ckpt_after_load": no_effect("see trainer.keep_checkpoints"),
    "trainer.esi_redundant_time": no_effect("SIGTERM saves a checkpoint"),
    "trainer.use_legacy_worker_impl": no_effect("there is only one implementation"),
    **no_effects("trainer.profiler", PROFILER_KEYS, TRACES),
    "trainer.profile_steps": no_effect(TRACES),
    **no_effects(
        "global_profiler",
        ("tool", "steps", "profile_continuous_steps", "save_path", "global_tool_config", "global_tool_config.*"),
        TRACES,
    ),
    "model_engine": engine,
    "hydra.*": lambda _key, _value, _given: Translation({}),
    "global_profiler.relocate_results": no_effect(TRACES),
    **ray_rules("ray_kwargs.ray_init"),
    **ray_rules("ray_init"),
    "ray_kwargs.timeline_json_file": no_effect(TRACES),
}
