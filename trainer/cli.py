"""The command line: data, warm start, training, report. Heavy imports wait until a command needs them."""

import json
import logging
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from typer.exceptions import TyperException

from trainer.errors import TrainerError

app = typer.Typer(
    name="trainer",
    help="PPO on Ray, vLLM and torch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
data = typer.Typer(help="Make prompt files.", no_args_is_help=True)
app.add_typer(data, name="data")

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
    from trainer.overrides import parse_overrides
    from trainer.sft import SftConfig, fine_tune

    typer.echo(fine_tune(parse_overrides(overrides or [], SftConfig)).output)


@app.command()
def train(overrides: Overrides = None) -> None:
    """Train with PPO."""
    from trainer.config import Config
    from trainer.overrides import parse_overrides

    settings: Config = parse_overrides(overrides or [])
    from trainer.controller import train as run
    from trainer.report import write_report

    typer.echo(write_report(run(settings).run_dir))


@app.command()
def config(
    overrides: Overrides = None,
    fields: Annotated[bool, typer.Option("--fields", help="Document every setting instead.")] = False,
) -> None:
    """Show the settings of a run as JSON."""
    from trainer.config import Config
    from trainer.overrides import parse_overrides, settings

    resolved: Config = parse_overrides(overrides or [])
    if not fields:
        typer.echo(resolved.model_dump_json(indent=2))
        return
    for setting in settings(Config):
        default = json.dumps(setting.default, default=str)
        typer.echo(f"{setting.key}={default}  ({setting.expected})  {setting.description}".rstrip())


@app.command()
def report(run: Annotated[Path, typer.Argument(help="Directory of a run, as in runs/20260101T120000Z.")]) -> None:
    """Write a run's report.html."""
    from trainer.report import write_report

    typer.echo(write_report(run))


def main() -> NoReturn:
    """Runs the command line; every expected failure ends in one message and its own exit code."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        status = app(standalone_mode=False)
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
