"""The command line: data, warm start, training, report. Heavy imports wait until a command needs them."""

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from typer.exceptions import TyperException

from trainer.errors import TrainerError

if TYPE_CHECKING:
    from trainer.config.tree import Config

app = typer.Typer(
    name="trainer",
    help="Reinforcement learning of language models on Ray, vLLM and torch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
data = typer.Typer(help="Make prompt files.", no_args_is_help=True)
app.add_typer(data, name="data")

Files = Annotated[
    list[str] | None,
    typer.Option("--config", metavar="FILE|PRESET", help="YAML with settings, or a preset; the last one counts."),
]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE…", help="Settings that differ.")]


@data.command()
def arithmetic(
    output: Annotated[Path, typer.Option(help="Directory for the three parquet files.")] = Path("data"),
    train: Annotated[int, typer.Option(min=1, help="Questions to train on.")] = 4096,
    validation: Annotated[int, typer.Option(min=1, help="Questions held out.")] = 256,
    max_number: Annotated[int, typer.Option(min=2, help="Largest number in a question.")] = 9,
    dropped_carries: Annotated[
        float,
        typer.Option(min=0, max=1, help="Share of the demonstrated sums with a carry that are worked out without."),
    ] = 0.75,
    seed: Annotated[int, typer.Option(help="Another seed, other questions.")] = 0,
) -> None:
    """Make word problems about small sums, and demonstrations of them by someone who mostly forgets to carry."""
    from trainer.data.arithmetic import write_arithmetic

    for path in write_arithmetic(output, train, validation, max_number, dropped_carries, seed):
        typer.echo(path)


@data.command()
def preferences(
    output: Annotated[Path, typer.Option(help="Directory for the two parquet files.")] = Path("data"),
    train: Annotated[int, typer.Option(min=1, help="Pairs to train on.")] = 4096,
    validation: Annotated[int, typer.Option(min=1, help="Pairs held out.")] = 256,
    max_number: Annotated[int, typer.Option(min=2, help="Largest number in a question.")] = 9,
    seed: Annotated[int, typer.Option(help="Another seed, other questions.")] = 0,
) -> None:
    """Make pairs of answers to the questions of `data arithmetic`, of which the right one is preferred."""
    from trainer.data.arithmetic import write_preferences

    for path in write_preferences(output, train, validation, max_number, seed):
        typer.echo(path)


@data.command()
def gsm8k(
    input: Annotated[Path, typer.Option(help="GSM8K as parquet or jsonl, with question and answer.")],
    output: Annotated[Path | None, typer.Option(help="Parquet file to write; beside the input by default.")] = None,
) -> None:
    """Convert a GSM8K file."""
    from trainer.data.gsm8k import convert_gsm8k

    typer.echo(convert_gsm8k(input, output))


@app.command()
def sft(overrides: Overrides = None) -> None:
    """Warm-start a small model on questions and answers."""
    from trainer.config.overrides import parse_overrides
    from trainer.runs.sft import SftConfig, fine_tune

    typer.echo(fine_tune(parse_overrides(overrides or [], SftConfig)).output)


@app.command()
def dpo(overrides: Overrides = None) -> None:
    """Learn from pairs of responses, of which one was preferred."""
    from trainer.config.overrides import parse_overrides
    from trainer.records.report import write_report
    from trainer.runs.dpo import DpoConfig, train_on_preferences

    typer.echo(write_report(train_on_preferences(parse_overrides(overrides or [], DpoConfig))))


@app.command()
def train(overrides: Overrides = None, config: Files = None) -> None:
    """Train a policy: PPO, GRPO, RLOO, REINFORCE++, ReMax and what they are combined with."""
    settings = load(config, overrides)
    from trainer.records.report import write_report
    from trainer.runs.ppo import train as run

    typer.echo(write_report(run(settings).run_dir))


@app.command()
def config(
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY[=VALUE]…", help="Settings to explain, or that differ.")
    ] = None,
    config: Files = None,
    check: Annotated[
        bool, typer.Option("--check", help="Show the resolved settings also where only names are given.")
    ] = False,
    fields: Annotated[bool, typer.Option("--fields", help="Explain every setting.")] = False,
) -> None:
    """Explain settings that are named, and check those that are given; nothing is started.

    `config actor.clip_ratio` explains a setting, `config actor` a section; `config KEY=VALUE…` checks settings as
    `train` would and shows the resolved ones as JSON.
    """
    from trainer.config.overrides import explain_settings
    from trainer.config.tree import Config

    arguments = overrides or []
    names = [argument for argument in arguments if "=" not in argument]
    if fields:
        names = list(Config.model_fields)
    if names:
        typer.echo("\n".join(explain_settings(names)))
    given = [argument for argument in arguments if "=" in argument]
    if check or given or not names:
        typer.echo(load(config, given).model_dump_json(indent=2))


def load(files: list[str] | None, overrides: list[str] | None) -> "Config":
    """The settings of a run; what the user should know about them goes to standard error."""
    from trainer.config.overrides import load_config

    settings, notes = load_config(files or [], overrides or [])
    for note in notes:
        logging.warning("warning: %s", note)
    return settings


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Directories of runs, as in runs/20260101T120000Z.")],
    output: Annotated[Path, typer.Option(help="Page to write where runs are compared.")] = Path("comparison.html"),
) -> None:
    """Write a run's report.html, or one page that compares several runs."""
    if len(runs) > 1:
        from trainer.records.comparison import write_comparison

        typer.echo(write_comparison(runs, output))
        return
    from trainer.records.report import write_report

    typer.echo(write_report(runs[0]))


def main(arguments: list[str] | None = None) -> NoReturn:
    """Runs the command line, by default the process's own; an expected failure is one message and an exit code."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        status = app(arguments, standalone_mode=False)
    except TrainerError as error:
        sys.exit(_fail(str(error), error.hint, error.exit_code))
    except TyperException as error:
        sys.exit(_fail(error.format_message(), "`python -m trainer --help` lists commands and options", 2))
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    sys.exit(status)


def _fail(message: str, hint: str, exit_code: int) -> int:
    typer.echo(f"error: {message}" + (f"\n\nhint: {hint}" if hint else ""), err=True)
    return exit_code
