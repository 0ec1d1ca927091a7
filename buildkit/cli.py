"""The `buildkit` command: results on stdout, everything else on stderr, each error once with its hint."""

import logging
import signal
import sys
from typing import Annotated

import typer
from rich.markup import escape

from buildkit.commands.build import build
from buildkit.commands.certify import certify
from buildkit.commands.doctor import doctor
from buildkit.commands.export import export
from buildkit.commands.lock import lock
from buildkit.commands.options import errors
from buildkit.commands.plan import plan
from buildkit.commands.publish import publish
from buildkit.commands.render import render
from buildkit.commands.run import run
from buildkit.commands.sbom import sbom
from buildkit.commands.slurm import slurm
from buildkit.commands.targets import targets
from buildkit.commands.test import run_tests
from buildkit.commands.verify import verify
from buildkit.commands.warm import warm
from buildkit.errors import BuildkitError
from buildkit.recipe.project import own_project, project_version

app = typer.Typer(
    help="Build, run and test Slipway's container images.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

PASSED_ON = {"allow_interspersed_args": False}  # what follows `--` belongs to another command, options included

app.command()(targets)
app.command()(render)
app.command()(lock)
app.command()(plan)
app.command()(build)
app.command(context_settings=PASSED_ON)(run)
app.command(context_settings=PASSED_ON)(slurm)
app.command()(doctor)
app.command()(export)
app.command("test", context_settings=PASSED_ON)(run_tests)
app.command(context_settings=PASSED_ON)(certify)
app.command(context_settings=PASSED_ON)(warm)
app.command()(sbom)
app.command()(publish)
app.command()(verify)


def show_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"buildkit {project_version(own_project())}\n")
        raise typer.Exit


@app.callback()
def common(
    _version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Build, run and test Slipway's container images."""


def _end(number: int, _frame: object) -> None:
    sys.exit(128 + number)


def main() -> None:
    """The console script. Prints a `BuildkitError` as `error:` and `hint:` and exits with its code; 130 on Ctrl-C."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)  # Python would end at once, and leave the files with passwords that a build reads
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    logging.getLogger("docker").setLevel(logging.WARNING)
    try:
        app()
    except BuildkitError as error:
        errors.print(f"[bold red]error:[/] {escape(str(error))}")
        if error.hint:
            errors.print(f"\n[bold]hint:[/] {escape(error.hint)}")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        errors.print("interrupted")
        sys.exit(130)
