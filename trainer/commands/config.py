"""The command `config`."""

from typing import Annotated

import typer

from trainer.commands.options import ConfigName, ConfigPath, Files, load
from trainer.commands.output import emit


def config(
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY[=VALUE]…", help="Settings to explain or to override.")
    ] = None,
    config: Files = None,
    check: Annotated[
        bool, typer.Option("--check", help="Print the resolved settings even if only names are given.")
    ] = False,
    fields: Annotated[bool, typer.Option("--fields", help="Explain every setting of every command.")] = False,
    config_name: ConfigName = None,
    config_path: ConfigPath = None,
) -> None:
    """Explain settings, or check them without starting anything.

    `config actor.clip_ratio` explains a setting, and `config dpo` a section, of any command. `config KEY=VALUE…` checks
    settings as `train` would, and prints the resolved settings as JSON.
    """
    from trainer.compat.settings import explain_settings
    from trainer.config.overrides import every_section

    arguments = overrides or []
    names = [argument for argument in arguments if "=" not in argument and not argument.startswith("~")]
    if fields:
        names = every_section()
    if names:
        emit("\n".join(explain_settings(names)))
    given = [argument for argument in arguments if argument not in names]
    if check or given or not names:
        emit(load(config, given, config_name, config_path).model_dump_json(indent=2))
