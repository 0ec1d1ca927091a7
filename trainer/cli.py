"""The command line of the trainer. Commands import heavy packages only when they run."""

import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn, TypeVar

import typer
from typer.exceptions import TyperException

from trainer.errors import TrainerError

if TYPE_CHECKING:
    from trainer.config.tree import Config, RunConfig

RunSettings = TypeVar("RunSettings", bound="RunConfig")

app = typer.Typer(
    name="trainer",
    help="Train language models with reinforcement learning, on Ray, vLLM and PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
data = typer.Typer(help="Write files of prompts.", no_args_is_help=True)
app.add_typer(data, name="data")

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


@data.command()
def arithmetic(
    output: Annotated[Path, typer.Option(help="Directory for the three Parquet files.")] = Path("data"),
    train: Annotated[int, typer.Option(min=1, help="Training questions.")] = 4096,
    validation: Annotated[int, typer.Option(min=1, help="Held-out questions.")] = 256,
    max_number: Annotated[int, typer.Option(min=2, help="Largest number in a question.")] = 9,
    dropped_carries: Annotated[
        float,
        typer.Option(min=0, max=1, help="Share of demonstrated sums with a carry that drop it."),
    ] = 0.75,
    seed: Annotated[int, typer.Option(help="Seed of the questions.")] = 0,
) -> None:
    """Write word problems about small sums, with demonstrations that often drop the carry."""
    from trainer.data.arithmetic import write_arithmetic

    for path in write_arithmetic(output, train, validation, max_number, dropped_carries, seed):
        typer.echo(path)


@data.command()
def preferences(
    output: Annotated[Path, typer.Option(help="Directory for the two Parquet files.")] = Path("data"),
    train: Annotated[int, typer.Option(min=1, help="Training pairs.")] = 4096,
    validation: Annotated[int, typer.Option(min=1, help="Held-out pairs.")] = 256,
    max_number: Annotated[int, typer.Option(min=2, help="Largest number in a question.")] = 9,
    seed: Annotated[int, typer.Option(help="Seed of the questions.")] = 0,
) -> None:
    """Write preference pairs for the questions of `data arithmetic`: a right and a wrong answer to each."""
    from trainer.data.arithmetic import write_preferences

    for path in write_preferences(output, train, validation, max_number, seed):
        typer.echo(path)


@data.command()
def gsm8k(
    input: Annotated[Path, typer.Option(help="GSM8K as Parquet or JSON Lines, with the columns question and answer.")],
    output: Annotated[Path | None, typer.Option(help="Parquet file to write. The default is beside the input.")] = None,
) -> None:
    """Convert a GSM8K file to prompts."""
    from trainer.data.gsm8k import convert_gsm8k

    typer.echo(convert_gsm8k(input, output))


@app.command()
def sft(
    overrides: Overrides = None,
    config: Files = None,
    config_name: ConfigName = None,
    config_path: ConfigPath = None,
) -> None:
    """Fine-tune `model.path` on responses or conversations; without it, make a small model as a warm start.

    Settings of the warm start have no section, like `train_files=FILE steps=200`.
    """
    from trainer.config.sft import SftConfig

    sections = {*SftConfig.model_fields, "optim", "engine", "checkpoint"}  # the last three are verl's
    named = [argument.lstrip("+~").partition("=")[0].partition(".")[0] for argument in overrides or []]
    if config or config_name or sections.intersection(named):
        settings = load_as(SftConfig, config, overrides, config_name, config_path)
        from trainer.records.pages.report import write_report
        from trainer.runs.sft import fine_tune

        typer.echo(write_report(fine_tune(settings)))
        return
    from trainer.config.overrides import parse_overrides
    from trainer.runs.warm_start import WarmStartConfig, make_warm_start

    typer.echo(make_warm_start(parse_overrides(overrides or [], WarmStartConfig)).output)


@app.command()
def dpo(overrides: Overrides = None, config: Files = None) -> None:
    """Train on preference pairs with DPO."""
    from trainer.config.overrides import parse_overrides
    from trainer.records.pages.report import write_report
    from trainer.runs.dpo import DpoConfig, train_on_preferences

    typer.echo(write_report(train_on_preferences(parse_overrides(overrides or [], DpoConfig, config or []))))


@app.command()
def kto(overrides: Overrides = None, config: Files = None) -> None:
    """Train with KTO on responses that are labelled desirable or undesirable."""
    from trainer.config.overrides import parse_overrides
    from trainer.records.pages.report import write_report
    from trainer.runs.kto import KtoConfig, train_on_labels

    typer.echo(write_report(train_on_labels(parse_overrides(overrides or [], KtoConfig, config or []))))


@app.command()
def train(
    overrides: Overrides = None,
    config: Files = None,
    config_name: ConfigName = None,
    config_path: ConfigPath = None,
) -> None:
    """Train a policy with PPO, GRPO, RLOO, REINFORCE++ or ReMax."""
    settings = load(config, overrides, config_name, config_path)
    from trainer.records.pages.report import write_report
    from trainer.runs.ppo import train as run

    typer.echo(write_report(run(settings).run_dir))


@app.command()
def config(
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY[=VALUE]…", help="Settings to explain or to override.")
    ] = None,
    config: Files = None,
    check: Annotated[
        bool, typer.Option("--check", help="Print the resolved settings even if only names are given.")
    ] = False,
    fields: Annotated[bool, typer.Option("--fields", help="Explain every setting.")] = False,
    config_name: ConfigName = None,
    config_path: ConfigPath = None,
) -> None:
    """Explain settings, or check them without starting anything.

    `config actor.clip_ratio` explains a setting, and `config actor` a section. `config KEY=VALUE…` checks settings as
    `train` would, and prints the resolved settings as JSON.
    """
    from trainer.config.overrides import explain_settings
    from trainer.config.tree import Config

    arguments = overrides or []
    names = [argument for argument in arguments if "=" not in argument and not argument.startswith("~")]
    if fields:
        names = list(Config.model_fields)
    if names:
        typer.echo("\n".join(explain_settings(names)))
    given = [argument for argument in arguments if argument not in names]
    if check or given or not names:
        typer.echo(load(config, given, config_name, config_path).model_dump_json(indent=2))


@app.command()
def plan(
    overrides: Overrides = None,
    config: Files = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Nodes; trainer.nnodes or 1 if not given.")] = None,
    gpus: Annotated[
        int | None, typer.Option(min=0, help="GPUs of a node; trainer.n_gpus_per_node or those here if not given.")
    ] = None,
    gpu_gib: Annotated[
        float | None, typer.Option(min=0, help="GiB of memory of a GPU, like 80; that of the GPUs here if not given.")
    ] = None,
    config_name: ConfigName = None,
    config_path: ConfigPath = None,
) -> None:
    """Show which role would run where, the settings that would be chosen and why, and the memory. Starts nothing."""
    settings = load(config, overrides, config_name, config_path)
    from trainer.planning.machine import plan_without_cluster

    for line in plan_without_cluster(settings, nodes, gpus, gpu_gib).lines():
        typer.echo(line)


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


@app.command("import")
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
    from trainer.errors import ConfigError

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
        typer.echo(f"{target}\n\n{found.report()}")
        missing = missing or bool(found.missing)
    if missing:
        raise typer.Exit(2)


def _settings_of(command: str) -> type["RunConfig"]:
    """The type of the settings that `train`, `sft`, `dpo` or `kto` takes."""
    if command == "sft":
        from trainer.config.sft import SftConfig

        return SftConfig
    if command == "dpo":
        from trainer.runs.dpo import DpoConfig

        return DpoConfig
    if command == "kto":
        from trainer.runs.kto import KtoConfig

        return KtoConfig
    from trainer.config.tree import Config

    return Config


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run directories, like runs/20260101T120000Z.")],
    output: Annotated[Path, typer.Option(help="Page that compares several runs.")] = Path("comparison.html"),
) -> None:
    """Write the report.html of a run, or a page that compares several runs."""
    if len(runs) > 1:
        from trainer.records.pages.comparison import write_comparison

        typer.echo(write_comparison(runs, output))
        return
    from trainer.records.pages.report import write_report

    typer.echo(write_report(runs[0]))


@app.command()
def top(
    run: Annotated[Path, typer.Argument(help="Run directory, like runs/20260101T120000Z. The run may still go on.")],
) -> None:
    """Show a run live: phases of the last step, metrics as they move, this host's GPUs; once if piped."""
    from rich.console import Console

    from trainer.records.top import watch

    watch(run, Console())


@app.command()
def samples(
    run: Annotated[Path, typer.Argument(help="Run directory, like runs/20260101T120000Z. The run may still go on.")],
    step: Annotated[int | None, typer.Option(min=0, help="The default is the last recorded step.")] = None,
    validation: Annotated[bool, typer.Option("--validation", help="Show the validation after the step.")] = False,
    best: Annotated[int | None, typer.Option(min=1, metavar="N", help="Show the N highest rewards.")] = None,
    worst: Annotated[int | None, typer.Option(min=1, metavar="N", help="Show the N lowest rewards.")] = None,
) -> None:
    """Show prompts, responses and rewards of a step or validation; without --best and --worst, the first four."""
    from trainer.records.files.run_files import recorded_trajectories
    from trainer.records.trajectories import show

    rows = recorded_trajectories(run, step, validation)
    ordered = sorted(rows, key=lambda row: row["reward"])
    chosen = (ordered[::-1][:best] if best else []) + (ordered[:worst] if worst else [])
    for row in chosen or rows[:4]:
        typer.echo(show(row) + "\n")


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="Run directory, like runs/20260101T120000Z. The run may still go on.")],
    step: Annotated[
        int | None, typer.Option(min=0, help="Step of the checkpoint. The default is the last one.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Directory to write. The default is RUN/models/step_000010.")
    ] = None,
    model: Annotated[Path | None, typer.Option(help="Where the run's starting model is now, if it moved.")] = None,
) -> None:
    """Write a checkpoint's policy as a model directory for Transformers and vLLM."""
    from trainer.runs.export import export_checkpoint

    typer.echo(export_checkpoint(run, step, output, model))


@app.command()
def verify(
    run: Annotated[Path, typer.Argument(help="Run directory, like runs/20260101T120000Z. The run must have ended.")],
) -> None:
    """Compare a run with its certificate: data, models, settings, checkpoints, exported model.

    Prints each difference. The exit status is 0 if there is none, else 1.
    """
    from trainer.runs.reproduction.verify import verify as differences_of

    found = differences_of(run)
    typer.echo("\n".join(found) or f"{run}: as certified")
    if found:
        raise typer.Exit(1)


@app.command()
def replay(
    run: Annotated[Path, typer.Argument(help="Run directory, like runs/20260101T120000Z. The run must have ended.")],
    step: Annotated[
        int | None, typer.Option(min=1, help="Step to compare and to end at. The default is the last certified one.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="New run directory. The default is RUN-replay.")] = None,
) -> None:
    """Run the same settings again in a new directory, and compare metrics and weights to the bit.

    The exit status is 0 if both are equal, and 1 if not. A run whose image, data, models or hardware differ here, or
    whose mode depends on timing, is refused with the reasons (exit status 2).
    """
    from trainer.runs.reproduction.replay import replay as run_again

    found = run_again(run, step, output)
    typer.echo("\n".join(found.lines()))
    if found.differences:
        raise typer.Exit(1)


def main(arguments: list[str] | None = None) -> NoReturn:
    """Runs a command line, by default that of the process.

    An expected error is printed as one message and sets the exit code.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        status = app(arguments, standalone_mode=False)
    except TrainerError as error:
        sys.exit(report_failure(error))
    except TyperException as error:
        sys.exit(_fail(error.format_message(), "`python -m trainer --help` lists commands and options", 2))
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    sys.exit(status)


def report_failure(error: TrainerError) -> int:
    """Prints an expected error; the exit code."""
    return _fail(str(error), error.hint, error.exit_code)


def _fail(message: str, hint: str, exit_code: int) -> int:
    typer.echo(f"error: {message}" + (f"\n\nhint: {hint}" if hint else ""), err=True)
    return exit_code
