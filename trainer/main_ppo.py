"""`python -m trainer.main_ppo KEY=VALUE…`: verl's launch lines, with verl's defaults."""

import sys
from typing import NoReturn

from trainer.cli import main, report_failure
from trainer.config.imports import preset_of
from trainer.errors import ConfigError


def run(entry: str = "trainer.main_ppo") -> NoReturn:
    """Trains with the defaults of an entry point of verl's and the settings of the command line."""
    try:
        preset = preset_of(entry)
    except ConfigError as error:
        sys.exit(report_failure(error))
    main(["train", "--config", preset, *(_without_option(argument) for argument in sys.argv[1:])])


def _without_option(argument: str) -> str:
    """Options that verl's launch lines give besides settings, as settings."""
    return argument.replace("--ddp_backend=", "ddp_config.backend=", 1)


if __name__ == "__main__":
    run()
