"""`python -m trainer.main_ppo KEY=VALUE…`: verl's launch lines, with verl's defaults."""

import os
import sys
from collections.abc import Mapping
from typing import NoReturn

from trainer.cli import main, report_failure
from trainer.config.imports import command_of, preset_of
from trainer.errors import ConfigError


def run(entry: str = "trainer.main_ppo") -> NoReturn:
    """Trains with the defaults of an entry point of verl's and the settings of the command line."""
    try:
        preset = preset_of(entry)
    except ConfigError as error:
        sys.exit(report_failure(error))
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ["RANK"] != "0":
        sys.exit(0)  # torchrun starts a process per device; the first one starts the workers of all
    settings = [*(_without_option(argument) for argument in sys.argv[1:]), *devices(os.environ)]
    main([command_of(entry), "--config", preset, *settings])


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
