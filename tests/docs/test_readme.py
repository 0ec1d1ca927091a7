"""Each command of the README is parsed by its own program, or names the hardware or cluster that it needs."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import buildkit.cli
import trainer.cli
from entrypoints.cli import SUBCOMMANDS
from entrypoints.cli import _parser as launch_parser
from trainer.main_ppo import preset_of

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ELSEWHERE = {"sbatch", "docker", "mpirun"}
"""Programs that need a cluster or GPUs: the README says so above the line."""


def commands_in(text: str) -> Iterator[tuple[str, str]]:
    """Each command line in a page, with the comment above it."""
    for block in re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        comment = ""
        for line in block.replace("\\\n", "").splitlines():
            if line.startswith("#"):
                comment = line
            elif not line:
                comment = ""
            else:
                yield line, comment


COMMANDS = list(commands_in(README))


def parse(command: Any, name: str, words: list[str]) -> None:
    """Parse words as typer does, without running anything."""
    context = command.make_context(name, words)
    if hasattr(command, "commands"):
        name, child, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        parse(child, name, rest)


def parse_launch(words: list[str]) -> None:
    match launch_parser({}).parse_args(words).words:
        case ["train", *_] as command:
            parse_trainer(command)
        case ["--", "python3", "-m", module, *_]:
            assert module.startswith("verl.")
            assert preset_of(module)
        case [subcommand, *_]:
            assert subcommand in SUBCOMMANDS


def parse_trainer(words: list[str]) -> None:
    parse(typer.main.get_command(trainer.cli.app), "trainer", words)


@pytest.mark.parametrize(("line", "comment"), COMMANDS)
def test_command_is_understood(line: str, comment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "runs" / "ID"  # commands that read a run refuse one that does not exist
    run.mkdir(parents=True)
    (run / "metrics.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    words = shlex.split(line, comments=True)
    if ">" in words:
        words = words[: words.index(">")]
    match words:
        case ["buildkit", *rest]:
            parse(typer.main.get_command(buildkit.cli.app), "buildkit", rest)
            if "--" in rest:
                parse_launch(rest[rest.index("--") + 1 :])
        case ["launch", *rest]:
            parse_launch(rest)
        case ["python", "-m", "trainer", *rest]:
            parse_trainer(rest)
        case ["pip", "install", "." | ".[trainer]"]:
            assert (ROOT / "tests" / "wheel" / "test_wheel.py").is_file(), "it installs the wheel and runs the commands"
        case [program, *rest] if program in ELSEWHERE:
            assert comment.startswith("# needs "), f"say above {line!r} what it needs"
            starts = [at for at, word in enumerate(rest) if word == "launch" or word.startswith("slipway:")]
            if starts:
                parse_launch(rest[starts[0] + 1 :])
        case [script]:
            assert os.access(ROOT / script, os.X_OK)
        case _:
            pytest.fail(f"no test reads {line!r}")


def settings(line: str) -> list[str]:
    """The settings of a training run in a command line, a preset included."""
    words = shlex.split(line, comments=True)
    presets = [word for at, word in enumerate(words) if word == "--config" or words[at - 1] == "--config"]
    return presets + [word for word in words if re.match(r"[a-z_]+\.[a-z_.]+=", word)]


@pytest.mark.parametrize("given", [given for line, _ in COMMANDS if (given := settings(line))], ids=" ".join)
def test_settings_are_accepted(given: list[str]) -> None:
    command = [sys.executable, "-m", "trainer", "config", "--check", *given]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
