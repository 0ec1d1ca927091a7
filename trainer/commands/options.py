"""Options that several commands share, and the settings that they name."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

if TYPE_CHECKING:
    from trainer.config.tree import Config, RunConfig

RunSettings = TypeVar("RunSettings", bound="RunConfig")

Files = Annotated[
    list[str] | None,
    typer.Option(
        "--config", metavar="FILE|PRESET", help="YAML file of settings, or a preset. Later files override earlier ones."
    ),
]
ConfigName = Annotated[
    str | None, typer.Option("--config-name", "-cn", metavar="NAME", help="Hydra's name of a YAML file, or of verl's.")
]
ConfigPath = Annotated[
    str | None, typer.Option("--config-path", "-cp", metavar="DIR", help="Hydra's directory of --config-name.")
]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE…", help="Settings to override.")]
RunDirectory = Annotated[
    Path, typer.Argument(help="Run directory, like runs/20260101T120000Z. The run may still go on.")
]
EndedRun = Annotated[Path, typer.Argument(help="Run directory, like runs/20260101T120000Z. The run must have ended.")]


def load(
    files: list[str] | None,
    overrides: list[str] | None,
    config_name: str | None = None,
    config_path: str | None = None,
) -> "Config":
    """The settings of `train`. Notes about them go to standard error."""
    from trainer.config.tree import Config

    return load_as(Config, files, overrides, config_name, config_path)


def load_as(
    model: type[RunSettings],
    files: list[str] | None,
    overrides: list[str] | None,
    config_name: str | None = None,
    config_path: str | None = None,
) -> RunSettings:
    """The settings of another kind of run; see `load`."""
    from trainer.config.files import hydra_files
    from trainer.config.overrides import load_config

    named = hydra_files(config_name, config_path) if config_name else []
    settings, notes = load_config([*(files or []), *named], overrides or [], model)
    for note in notes:
        logging.warning("warning: %s", note)
    return settings
