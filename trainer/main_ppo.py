"""`python -m trainer.main_ppo KEY=VALUE…`: verl's launch lines, with verl's defaults."""

import os
import sys
from collections.abc import Mapping
from typing import NoReturn

from trainer.cli import report_failure, run_process
from trainer.config.files import PRESETS
from trainer.errors import ConfigError

# Modules of verl that train as this trainer does, by the end of their names, with the preset of their defaults.
_PRESETS = {
    "trainer.main_ppo": "verl",
    "trainer.main_fastrl": "verl",
    "trainer.main_ppo_sync": "verl",
    "transfer_queue.main_ppo": "verl",
    "main_ppo_split": "verl",
    "one_step_off_policy.main_ppo": "verl_one_step_off",
    "fully_async_main": "verl_fully_async",
    "reward_queue.main": "verl_fully_async",
    "partial_rollout.main_ppo": "verl_partial_rollout",
    "main_dapo": "verl_dapo",
    "main_entropy": "verl_dapo",
}
# Those that fine-tune, with the file of their defaults.
_SFT_FILES = {
    f"trainer.{module}": str(PRESETS / "sft" / f"{name}.yaml")
    for module, name in (
        ("sft_trainer", "verl"),
        ("sft_trainer_ray", "verl"),
        ("fsdp_sft_trainer", "verl_fsdp"),
    )
}
_SAMPLES_ONLY = ("samples or scores without training", "set trainer.validate_only=true and data.validation_files")
# Other modules: what they do, and what to do instead.
_OTHERS = {
    "main_generation": _SAMPLES_ONLY,
    "main_generation_server": _SAMPLES_ONLY,
    "main_eval": _SAMPLES_ONLY,
}


def run(entry: str = "trainer.main_ppo") -> NoReturn:
    """Trains with the defaults of an entry point of verl's and the settings of the command line."""
    try:
        preset = preset_of(entry)
    except ConfigError as error:
        sys.exit(report_failure(error))
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ["RANK"] != "0":
        sys.exit(0)  # torchrun starts a process per device; the first one starts the workers of all
    settings = [*(_without_option(argument) for argument in sys.argv[1:]), *devices(os.environ)]
    run_process([command_of(entry), "--config", preset, *settings])


def preset_of(entry: str) -> str:
    """The preset with the defaults of a module or file of verl's that a command runs.

    Raises ConfigError for a module that does something else than this trainer.
    """
    module = _module(entry)
    for ending, preset in (_PRESETS | _SFT_FILES).items():
        if module.endswith(f".{ending}"):
            return preset
    behaviour, hint = _OTHERS.get(
        module.rpartition(".")[2],
        ("is no entry point that this trainer knows", f"known: {', '.join(_PRESETS)}; it may train something else"),
    )
    raise ConfigError(f"{module.removeprefix('.')}: {behaviour}", hint=hint)


def command_of(entry: str) -> str:
    """Our command for a module or file of verl's."""
    return "sft" if any(_module(entry).endswith(f".{ending}") for ending in _SFT_FILES) else "train"


def _module(entry: str) -> str:
    return "." + entry.removesuffix(".py").replace("/", ".")


def devices(environment: Mapping[str, str]) -> list[str]:
    """The nodes and devices that torchrun was told, as settings; none without torchrun.

    torchrun counts processes. One process on a host without GPUs trains on CPU, as it does with torchrun's own.
    """
    if "TORCHELASTIC_RUN_ID" not in environment:
        return []
    local = int(environment["LOCAL_WORLD_SIZE"])
    nodes = int(environment["WORLD_SIZE"]) // local
    return [f"trainer.nnodes={nodes}", f"trainer.n_gpus_per_node={0 if local == 1 and not _has_gpu() else local}"]


def _has_gpu() -> bool:
    import torch  # only under torchrun, because it takes seconds

    return bool(torch.cuda.device_count())


def _without_option(argument: str) -> str:
    """Options that verl's launch lines give besides settings, as settings."""
    return argument.replace("--ddp_backend=", "ddp_config.backend=", 1)


if __name__ == "__main__":
    run()
