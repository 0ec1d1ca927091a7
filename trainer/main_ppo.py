"""`python -m trainer.main_ppo KEY=VALUE…`: verl's launch lines, with verl's defaults."""

import sys
from typing import NoReturn

from trainer.cli import main


def run(preset: str = "verl") -> NoReturn:
    """Trains with a preset and the settings of the command line."""
    main(["train", "--config", preset, *(_without_option(argument) for argument in sys.argv[1:])])


def _without_option(argument: str) -> str:
    """Options that verl's launch lines give besides settings, as settings."""
    return argument.replace("--ddp_backend=", "ddp_config.backend=", 1)


if __name__ == "__main__":
    run()
