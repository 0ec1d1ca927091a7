"""Options that several commands share, and the settings that they name."""

import difflib
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from trainer.errors import DataError

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


def existing_run(run: Path) -> Path:
    """The directory of a run. Raises DataError if there is none; the hint names runs beside it."""
    if any((run / name).exists() for name in _OF_A_RUN):
        return run
    others = [path.name for path in _folders(run.parent) if any((path / name).exists() for name in _OF_A_RUN)]
    near = difflib.get_close_matches(run.name, others, n=1)
    shown = f"{run.parent} has {', '.join(sorted(others)[-_SHOWN:])}" if others else "runs lie in trainer.output_dir"
    raise DataError(
        f"{run}: {'not the directory of a run' if run.exists() else 'no such run'}",
        hint=f"did you mean {run.parent / near[0]}?" if near else f"name the directory of a run; {shown}",
    )


def existing_runs(runs: list[Path]) -> list[Path]:
    """The directories of several runs; see `existing_run`."""
    return [existing_run(run) for run in runs]


def _folders(path: Path) -> list[Path]:
    return [folder for folder in path.iterdir() if folder.is_dir()] if path.is_dir() else []


# What a run writes, and no model directory holds.
_OF_A_RUN = ("metrics.jsonl", "certificate.json", "checkpoints", "trajectories", "validations")
_SHOWN = 5  # names of runs in an error

RunDirectory = Annotated[
    Path,
    typer.Argument(help="Run directory, like runs/20260101T120000Z. The run may still go on.", callback=existing_run),
]
EndedRun = Annotated[
    Path,
    typer.Argument(help="Run directory, like runs/20260101T120000Z. The run must have ended.", callback=existing_run),
]


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
    from trainer.compat.settings import hydra_files, load_config

    named = hydra_files(config_name, config_path) if config_name else []
    settings, notes = load_config([*(files or []), *named], overrides or [], model)
    for note in notes:
        logging.warning("warning: %s", note)
    return settings
