"""The command line of the trainer: one module per command, which imports heavy packages only when it runs."""

import logging
import sys
from typing import NoReturn

import typer
from typer.exceptions import TyperException

from trainer.background import end_process
from trainer.cluster.ending import leave
from trainer.commands.config import config
from trainer.commands.data import data
from trainer.commands.dpo import dpo
from trainer.commands.export import export
from trainer.commands.kto import kto
from trainer.commands.plan import plan
from trainer.commands.replay import replay
from trainer.commands.report import report
from trainer.commands.samples import samples
from trainer.commands.sft import sft
from trainer.commands.top import top
from trainer.commands.train import train
from trainer.commands.verify import verify
from trainer.errors import TrainerError
from trainer.records.printable import printable
from trainer.records.streams import detached_console

app = typer.Typer(
    name="trainer",
    help="Train language models with reinforcement learning, on Ray, vLLM and PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.add_typer(data, name="data")
app.command()(sft)
app.command()(dpo)
app.command()(kto)
app.command()(train)
app.command()(config)
app.command()(plan)
app.command()(report)
app.command()(top)
app.command()(samples)
app.command()(export)
app.command()(verify)
app.command()(replay)


def main(arguments: list[str] | None = None) -> NoReturn:
    """Runs a command line, by default that of the process.

    An expected error is printed as one message and sets the exit code.
    """
    with detached_console():
        status = _run(arguments)
    leave(status)


def run_process(arguments: list[str] | None = None) -> NoReturn:
    """`main` in a process of its own, which ends within a time, whatever threads and packages still wait for."""
    try:
        main(arguments)
    except SystemExit as end:
        end_process(end.code if isinstance(end.code, int) else int(end.code is not None))


def _run(arguments: list[str] | None) -> int | None:
    """The exit code."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Printable("%(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("matplotlib").setLevel(logging.WARNING)  # it would announce its font cache when it is imported
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it would log every request to the hub
    try:
        status: int | None = app(arguments, standalone_mode=False)
    except TrainerError as error:
        return report_failure(error)
    except TyperException as error:
        return _fail(error.format_message(), "`python -m trainer --help` lists commands and options", 2)
    except (KeyboardInterrupt, typer.Abort):
        return 130
    return status


def report_failure(error: TrainerError) -> int:
    """Prints an expected error; the exit code."""
    return _fail(str(error), error.hint, error.exit_code)


def _fail(message: str, hint: str, exit_code: int) -> int:
    typer.echo(printable(f"error: {message}" + (f"\n\nhint: {hint}" if hint else "")), err=True)
    return exit_code


class _Printable(logging.Formatter):
    """Messages may quote data, models and programs."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))
