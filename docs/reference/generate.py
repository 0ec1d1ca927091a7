"""Writes the reference pages from the code: commands, settings, exit codes, variables and metrics.

python docs/reference/generate.py            writes the pages
python docs/reference/generate.py --check    fails when a page differs from the code
"""

import argparse
import re
import sys
import textwrap
import types
import typing
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

import typer
from pydantic import BaseModel

import buildkit.cli
import buildkit.errors
import entrypoints.cli
import entrypoints.errors
import trainer.cli
import trainer.errors
from trainer.config.tree import RunConfig
from trainer.config.trees import TREES
from trainer.config.warm_start import WarmStartConfig
from trainer.records.metrics import METRICS

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
MADE = "Made from the code by `docs/reference/generate.py`; edit the code, not this page.\n"


def cell(text: str) -> str:
    """Text for one cell of a table."""
    return " ".join(text.replace("|", "\\|").split()) or "-"


def table(*header: str, rows: typing.Iterable[typing.Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *([cell(value) for value in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


# ---- command lines -------------------------------------------------------------------------------------------------

COMMON = 3
"""Commands of a program that share an option, from which on the page describes it once."""


class Option(typing.NamedTuple):
    """An option or argument of a command: its spelling and what it means, default included."""

    spelling: str
    meaning: str


class Command(typing.NamedTuple):
    title: str
    purpose: str
    options: list[Option]


def typer_commands(name: str, app: typer.Typer) -> list[Command]:
    """Each command of a typer application, groups included."""

    def visit(path: str, command: typing.Any) -> Iterator[Command]:
        if hasattr(command, "commands"):
            for word, child in command.commands.items():
                yield from visit(f"{path} {word}", child)
            return
        yield Command(path, command.help or "", list(typer_options(command)))

    return list(visit(name, typer.main.get_command(app)))


def typer_options(command: typing.Any) -> Iterator[Option]:
    for parameter in command.params:
        if getattr(parameter, "hidden", False) or parameter.name == "help":
            continue
        words = [*parameter.opts, *parameter.secondary_opts]
        if not parameter.opts[0].startswith("-"):
            words = [parameter.metavar or parameter.name.upper()]
        meaning = getattr(parameter, "help", "") or ""
        if parameter.required:
            meaning += " Required."
        elif not callable(parameter.default) and parameter.default not in (None, (), [], False):
            meaning += f" Default: `{parameter.default}`."
        yield Option(", ".join(f"`{word}`" for word in words), meaning)


def argparse_options(parser: argparse.ArgumentParser) -> list[Option]:
    options, formatter = [], parser._get_formatter()
    for action in parser._actions:
        if action.help == argparse.SUPPRESS or isinstance(action, argparse._HelpAction):
            continue
        metavar = action.metavar if isinstance(action.metavar, str) else ""
        words = [f"{word} {metavar}".strip() for word in action.option_strings] or [metavar or action.dest]
        meaning = formatter._expand_help(action) if action.help else ""
        options.append(Option(", ".join(f"`{word}`" for word in words), meaning))
    return options


def wrapped(text: str) -> str:
    """A paragraph in lines of at most 118 characters."""
    return textwrap.fill(" ".join(text.split()), 118, break_long_words=False, break_on_hyphens=False)


def program(listed: list[Command]) -> str:
    """A section per command. Options of several commands are in a table of their own, and named in each section."""
    count = Counter(option for command in listed for option in command.options)
    common = [option for option, commands in count.items() if commands >= COMMON]
    parts = []
    if common:
        parts.append("\nOptions of several commands:\n\n" + table("option", "meaning", rows=common))
    for command in listed:
        parts.append(f"\n### {command.title}\n\n{wrapped(command.purpose)}\n")
        shared = [option.spelling.partition(", ")[0] for option in command.options if option in common]
        special = [option for option in command.options if option not in common]
        if shared:
            parts.append("\n" + wrapped(f"Takes {', '.join(shared)}" + (", and:" if special else ".")) + "\n")
        if special:
            parts.append("\n" + table("option", "meaning", rows=special))
    return "".join(parts)


def commands() -> str:
    launch = []
    for word, subcommand in entrypoints.cli.SUBCOMMANDS.items():
        parser = argparse.ArgumentParser(add_help=False)
        subcommand.add_arguments(parser)
        launch.append(Command(f"launch {word}", sentence(subcommand.purpose), argparse_options(parser)))
    return "".join(
        [
            f"# Command lines\n\n{MADE}\n## buildkit\n",
            program(typer_commands("buildkit", buildkit.cli.app)),
            "\n## launch\n\nOptions come before the command. `launch train KEY=VALUE…` is short for\n"
            "`launch -- python -P -m trainer train KEY=VALUE…`.\n\n",
            table("option", "meaning", rows=argparse_options(entrypoints.cli._parser({}))),
            program(launch),
            "\n## python -m trainer\n",
            program(typer_commands("python -m trainer", trainer.cli.app)),
        ]
    )


def sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


# ---- settings ------------------------------------------------------------------------------------------------------


class Setting(typing.NamedTuple):
    name: str
    values: str
    """Its type and its default."""
    meaning: str


def spelled_type(annotation: typing.Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return spelled_type(arguments[0])
    if origin is typing.Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(spelled_type(member) for member in arguments if member is not type(None))
    if origin is not None:
        return f"{origin.__name__} of {' and '.join(spelled_type(member) for member in arguments)}"
    names = {"str": "text", "Path": "path", "int": "integer", "float": "number", "bool": "boolean"}
    name = getattr(annotation, "__name__", str(annotation))
    return names.get(name, name)


def spelled_default(value: object) -> str:
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, list):
        return f"`[{','.join(map(str, value))}]`"
    return f"`{value}`"


def spelled_values(annotation: typing.Any, default: object) -> str:
    """The type with the default: `integer, 64`; of named values the default is bold: `fsdp` among others."""
    values, value = spelled_type(annotation), spelled_default(default)
    listed = values.split(", ")
    if value in listed:
        return ", ".join(f"**{name}**" if name == value else name for name in listed)
    return f"{values}; {value}" if len(listed) > 1 else f"{values}, {value}"


def settings_of(model: type[BaseModel], prefix: str) -> Iterator[Setting]:
    for name, field in model.model_fields.items():
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from settings_of(annotation, f"{prefix}{name}.")
        else:
            default = field.get_default(call_default_factory=True)
            yield Setting(f"{prefix}{name}", spelled_values(annotation, default), field.description or "")


def settings() -> str:
    sections: dict[str, list[Setting]] = {}
    for tree in TREES.values():
        for name in tree.model_fields if issubclass(tree, RunConfig) else ():
            section = tree.model_fields[name].annotation
            assert isinstance(section, type)
            assert issubclass(section, BaseModel)
            sections.setdefault(name, list(settings_of(section, f"{name}.")))
    sections["A warm start: `trainer sft` without `model.path`"] = list(settings_of(WarmStartConfig, ""))
    names: dict[tuple[str, str, str], list[str]] = {}
    for setting in chain.from_iterable(sections.values()):
        names.setdefault(_same(setting), []).append(f"`{setting.name}`")
    parts = [
        f"# Settings\n\n{MADE}\n`python -m trainer config NAME` prints the same. Write settings as `KEY=VALUE` on the "
        "command line or as\nYAML in a file for `--config`; later beats earlier. `trainer dpo`, `kto` and `sft` read "
        "`model`, `trainer`, `data`,\n`actor` and their own section. Of named values the bold one is the default. "
        "Settings with the same meaning share\na row, in the section of the first; so most of the critic's are with "
        "the actor's.\n"
    ]
    for title, listed in sections.items():
        rows = [
            (", ".join(names.pop(_same(setting))), setting.values, setting.meaning)
            for setting in listed
            if _same(setting) in names
        ]
        parts.append(f"\n## {title}\n\n" + table("setting", "type, default", "meaning", rows=rows))
    return "".join(parts)


def _same(setting: Setting) -> tuple[str, str, str]:
    """Settings with an equal key are one row: the last part of the name, type, default and meaning."""
    return setting.name.rpartition(".")[2], setting.values, setting.meaning


# ---- exit codes ----------------------------------------------------------------------------------------------------


def classes(base: type[Exception]) -> Iterator[type[Exception]]:
    for subclass in base.__subclasses__():
        yield subclass
        yield from classes(subclass)


def documented(module: types.ModuleType) -> list[list[str]]:
    """The rows of the table in a module's docstring."""
    lines = [line for line in (module.__doc__ or "").splitlines() if line.startswith("|")]
    return [[value.strip() for value in line.strip("|").split("|")] for line in lines[2:]]


def complete(module: types.ModuleType, base: type[Exception], rows: list[list[str]]) -> None:
    """Every exit code of a class must be in the table."""
    codes = {row[0] for row in rows}
    for error in classes(base):
        code = getattr(error, "exit_code", 1)
        if code != 1 and str(code) not in codes:
            name = f"{module.__name__}.{error.__name__}"
            sys.exit(f"error: {name} has exit code {code}, which the table in its docstring lacks")


def exit_codes() -> str:
    launch, host = documented(entrypoints.errors), documented(buildkit.errors)
    complete(entrypoints.errors, entrypoints.errors.LaunchError, launch)
    complete(buildkit.errors, buildkit.errors.BuildkitError, host)
    run = sorted(
        (getattr(error, "exit_code", 1), error.__name__, (error.__doc__ or "").strip().splitlines()[0])
        for error in classes(trainer.errors.TrainerError)
    )
    return (
        f"# Exit codes\n\n{MADE}\n"
        "## launch\n\nAll nodes of a job exit with the same status.\n\n"
        + table("status", "meaning", rows=[row[:2] for row in launch])
        + "\n## python -m trainer\n\n"
        + table("status", "class", "cause", rows=[(str(code), f"`{name}`", cause) for code, name, cause in run])
        + "\n## buildkit\n\n`buildkit run` exits with the status of its command, `buildkit test` with pytest's, "
        "`buildkit doctor` with 1\nwhen a check failed.\n\n" + table("status", "class", "cause", rows=host)
    )


# ---- environment variables -----------------------------------------------------------------------------------------

VARIABLES = {
    "launch": {
        "SLIPWAY_HOSTS": "the nodes, the head first: `a,b` or `gpu-[0-3]`",
        "SLIPWAY_HOSTFILE": "a file with the nodes, one per line, the head first",
        "SLIPWAY_NODE_RANK": "this node's number, where its host name does not identify it",
        "SLIPWAY_NODES": "number of nodes, where nothing else gives it",
        "SLIPWAY_HEAD": "host name of the head, where nothing else gives it",
        "SLIPWAY_SINGLE": "1 runs on this node alone, whatever a scheduler says",
        "SLIPWAY_SERVICE": "Docker's service name, whose tasks are the nodes",
        "SLIPWAY_PODS_PER_JOB": "JobSet: pods in each of its jobs",
        "SLIPWAY_JOB_ID": "name of the job, where no scheduler gives one",
        "SLIPWAY_TOKEN": "the shared secret",
        "SLIPWAY_TOKEN_FILE": "a file with the shared secret, readable by its owner alone",
        "SLIPWAY_JOB_DIR": "a shared directory in which the head leaves token and addresses; `~/.slipway` below a "
        "scheduler if home is on a network file system",
        "SLIPWAY_DEADLINE": "seconds until every node must have joined",
        "SLIPWAY_CONTROL_PORT": "the port on which the head waits for the others",
        "SLIPWAY_MIN_NODES": "number of nodes that suffice",
        "SLIPWAY_SPARES": "number of nodes that wait for another's loss",
        "SLIPWAY_MAX_RESTARTS": "how often a failed command starts again",
        "SLIPWAY_TLS": "`1` encrypts Ray's traffic between the nodes",
        "SLIPWAY_DASHBOARD": "`HOST:PORT` at which the head serves Ray's dashboard; none when unset",
        "SLIPWAY_HCAS": "InfiniBand or RoCE adapters, instead of those that `launch` chooses",
        "SLIPWAY_INTERFACE": "network interface, instead of the one that `launch` chooses",
        "SLIPWAY_CACHE_DIR": "directory for caches, below `/tmp` by default",
        "SLIPWAY_LOG_DIR": "directory for every node's logs",
        "SLIPWAY_REPORT_DIR": "directory for preflight's report",
        "SLIPWAY_NODE_COUNT": "set by `launch` for the command: number of nodes that joined",
        "SLIPWAY_READY_FD": "set by `launch train`: file descriptor that holds a byte once Ray is up",
    },
    "buildkit and ci/publish": {
        "SLIPWAY_REGISTRY": "`HOST[:PORT]/REPOSITORY` to publish to",
        "SLIPWAY_REGISTRY_USER": "user name for this run, instead of what `docker login` stored",
        "SLIPWAY_REGISTRY_PASSWORD": "password for this run",
        "SLIPWAY_INDEX_MIRRORS": "`ADDRESS=MIRROR …`: mirrors of the vendors' wheel indexes that variants name",
        "SLIPWAY_REGISTRY_CA": "certificate of the registry's authority",
        "SLIPWAY_SIGN_KEY": "cosign's private key: a file, `env://NAME` or a key service",
        "SLIPWAY_WARM_KEY": "public key of whoever signed the warm cache of `--warm`",
        "SLIPWAY_SIGN_KEYLESS": "1 signs with the CI job's own identity",
        "SLIPWAY_BUILDER": "path of the reusable workflow that builds, for the provenance; `build.yml` sets it",
    },
}
# Variables of the tests and of ci/'s own scripts.
INTERNAL = re.compile(
    r"SLIPWAY_(TEST_|DEMO_|CI_READY|IMAGE_STORE|DOCKER_WITHOUT_BUILDX|REHEARSE_ON_CPU|ROOTLESS_USER|$)"
)


def variables() -> str:
    read = {
        name
        for room in ("buildkit", "entrypoints", "trainer", "ci", "images")
        for file in (ROOT / room).rglob("*")
        if file.is_file() and file.suffix != ".txt" and "__pycache__" not in file.parts
        for name in re.findall(r"SLIPWAY_[A-Z_]*[A-Z]", file.read_text(encoding="utf-8", errors="replace"))
        if not INTERNAL.match(name)
    }
    listed = {name for rows in VARIABLES.values() for name in rows}
    if read != listed:
        missing, gone = sorted(read - listed), sorted(listed - read)
        sys.exit(f"error: VARIABLES in {Path(__file__).name} lacks {missing} and has {gone}, which no code reads")
    parts = [f"# Environment variables\n\n{MADE}"]
    for title, rows in VARIABLES.items():
        pairs = [(f"`{name}`", meaning) for name, meaning in rows.items()]
        parts.append(f"\n## {title}\n\n" + table("variable", "meaning", rows=pairs))
    return "".join(parts)


def metrics() -> str:
    parts = [
        f"# Metrics\n\n{MADE}\nA metric appears in the steps to which it applies. "
        "`metrics.jsonl` has one object per step.\n"
    ]
    for group in dict.fromkeys(name.split("/")[0] for name in METRICS):
        rows = [(f"`{name}`", meaning) for name, meaning in METRICS.items() if name.startswith(f"{group}/")]
        parts.append(f"\n## {group}\n\n" + table("metric", "meaning", rows=rows))
    return "".join(parts)


PAGES: dict[str, Callable[[], str]] = {
    "commands.md": commands,
    "settings.md": settings,
    "exit-codes.md": exit_codes,
    "variables.md": variables,
    "metrics.md": metrics,
}


def main() -> None:
    stale = [name for name, page in PAGES.items() if not _is(HERE / name, page())]
    if sys.argv[1:] == ["--check"]:
        if stale:
            sys.exit(
                f"error: docs/reference/{', '.join(stale)} differ from the code\n\n"
                "hint: python docs/reference/generate.py"
            )
        return
    for name in stale:
        (HERE / name).write_text(PAGES[name](), encoding="utf-8")


def _is(file: Path, text: str) -> bool:
    return file.exists() and file.read_text(encoding="utf-8") == text


if __name__ == "__main__":
    main()
