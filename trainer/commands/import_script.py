"""The command `import`."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainer.commands.output import emit
from trainer.errors import ConfigError

if TYPE_CHECKING:
    from trainer.config.tree import RunConfig


def import_script(
    script: Annotated[
        Path, typer.Argument(metavar="SCRIPT", help="Shell script that starts verl, OpenRLHF, slime or TRL.")
    ],
    output: Annotated[Path | None, typer.Option(help="YAML file to write. The default is beside the script.")] = None,
    variables: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Variable of the script; 1 to 9: arguments.")
    ] = None,
) -> None:
    """Turn a script of verl, OpenRLHF, slime or TRL into settings of this trainer; say what stays the same.

    bash expands the script without starting a program. The exit status is 2 if something is missing.
    """
    from trainer.compat.scripts import has_overrides, training_commands
    from trainer.compat.tools import tool_of
    from trainer.config.imports import command_of, import_command_line, import_verl, named_files, split_options

    try:
        text = script.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{script}: cannot be read: {error}", hint="name a shell script") from error
    environment = {**os.environ, **dict(variable.partition("=")[::2] for variable in variables or [])}
    commands = training_commands(
        text, environment, Path.cwd(), str(script), lambda command: bool(tool_of(command)) or has_overrides(command)
    )
    if not commands:
        raise ConfigError(
            f"{script}: runs no Python with KEY=VALUE settings, and no command of OpenRLHF, slime or TRL",
            hint="name the script that starts the training",
        )
    missing = False
    for number, command in enumerate(commands, start=1):
        known, ours = tool_of(command), "train"
        if known:
            tool, ours = known
            found = import_command_line(tool, ours, command.arguments, _settings_of(ours))
        else:
            options, overrides = split_options(command.arguments)
            ours = command_of(command.entry)
            found = import_verl(
                [*overrides, *command.devices] if ours == "sft" else overrides,
                named_files(options, command.entry),
                _settings_of(ours),
            )
        suffix = ".yaml" if len(commands) == 1 else f".{number}.yaml"
        target = (output or script).with_suffix(suffix) if len(commands) > 1 or output is None else output
        heading = f"# Imported from {script.name}, {command.entry}: python -m trainer {ours} --config {target.name}\n"
        target.write_text(heading + found.yaml(), encoding="utf-8")
        emit(f"{target}\n\n{found.report()}")
        missing = missing or bool(found.missing)
    if missing:
        raise typer.Exit(2)


def _settings_of(command: str) -> type["RunConfig"]:
    """The type of the settings that `train`, `sft`, `dpo` or `kto` takes."""
    if command == "sft":
        from trainer.config.sft import SftConfig

        return SftConfig
    if command == "dpo":
        from trainer.runs.offline.dpo import DpoConfig

        return DpoConfig
    if command == "kto":
        from trainer.runs.offline.kto import KtoConfig

        return KtoConfig
    from trainer.config.tree import Config

    return Config
