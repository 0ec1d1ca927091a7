"""The commands that a script of verl's would run, with its variables, arrays and defaults expanded.

bash itself expands the script. It runs restricted and with an empty PATH, so no program starts, and no file is written:
every external command is recorded instead.
"""

import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# Shell functions replace builtins that would leave the restricted shell or wait. Commands whose output is common in
# variables get a plausible answer; a probe for an optional package fails, as on a machine without it.
_PRELUDE = r"""
cd() { :; }; pushd() { :; }; popd() { :; }; ulimit() { :; }; trap() { :; }; kill() { :; }; wait() { :; }; read() { :; }
exec() { if [ $# -gt 0 ]; then "$@"; fi; }
source() { if [ -f "$1" ]; then eval "$(<"$1")"; fi; }
.() { source "$@"; }
command_not_found_handle() {
    case "$1" in
        date|whoami|hostname|uuidgen|mktemp|git) echo "$1"; return 0;;
        nproc|nvidia-smi|wc|bc|expr) echo 8; return 0;;
        pwd|realpath|readlink) echo "${@: -1}"; return 0;;
        dirname) [[ "$2" == */* ]] && echo "${2%/*}" || echo .; return 0;;
        basename) echo "${2##*/}"; return 0;;
        seq) eval "echo {1..${@: -1}}"; return 0;;
        cat|tee|grep|sed|awk|cut|tr|head|tail|sort) return 0;;
        python*|pip*|uv) [[ "$2" == -c || "$2" == show ]] && return 1;;
    esac
    printf '%s\0' "$@" $'\x1e' >&9
}
set -- "${POSITIONAL[@]}"
"""
_START = 'exec 9>&1 1>&2 8>/dev/null; BASH_XTRACEFD=8; PATH=/nonexistent; set -r; eval "$1"'
_SECONDS = 5
_REDIRECT = re.compile(r"""(?<=\s)(?:&|\d)?>>?\|?[ ]*(?:"[^"\n]*"|'[^'\n]*'|>\([^)\n]*\)|[^\s;&|()]+)""")
_UNSET = re.compile(r"line \d+: \$?(\w+): (?:unbound variable|parameter (?:null or )?not set|[^:\n]+)$", re.MULTILINE)
# torchrun's options with a counterpart here, and those that take no value.
_TORCHRUN = {"nnodes": "trainer.nnodes", "nproc-per-node": "trainer.n_gpus_per_node"}
_TORCHRUN_SWITCHES = ("standalone", "no-python", "run-path")
_RESERVED = re.compile(r"\b(PATH|SHELL|ENV|BASH_ENV)=")


@dataclass(frozen=True)
class Command:
    """A training command: the module or file that Python runs, and its arguments.

    `devices` are the nodes and devices that torchrun is told, as settings of ours.
    """

    entry: str
    arguments: tuple[str, ...]
    devices: tuple[str, ...] = ()

    @property
    def overrides(self) -> list[str]:
        return [argument for argument in self.arguments if "=" in argument and not argument.startswith("-")]


class UnsetVariableError(Exception):
    """A script stopped because a variable is not set. `name` is the variable."""

    def __init__(self, name: str) -> None:
        super().__init__(f"the script requires the variable {name}")
        self.name = name


class ScriptEndedError(Exception):
    """A script ended with an error before any training command. The message has its last words."""


def training_commands(
    script: str, variables: Mapping[str, str], directory: Path | None = None, name: str = "script"
) -> list[Command]:
    """The commands with `KEY=VALUE` arguments that a script runs through Python.

    `variables` are those of its environment; `1` to `9` are its arguments. `directory` is where it starts, `name` is
    its path. Raises UnsetVariableError if it stops before any such command because a variable is not set, and
    ScriptEndedError if it ends there with an error.
    """
    recorded, end = _run(script, variables, directory, name)
    trainings = [command for arguments in recorded for command in _training(arguments, variables, directory)]
    if end is not None and not trainings:
        raise end
    return trainings


def _run(
    script: str, variables: Mapping[str, str], directory: Path | None, name: str
) -> tuple[list[list[str]], Exception | None]:
    """The commands recorded, and the error with which the script ended."""
    positional = [variables[name] for name in map(str, range(1, 10)) if name in variables]
    lines = [line if "((" in line else _REDIRECT.sub("", line) for line in script.splitlines()]
    body = _RESERVED.sub(r"UNUSED_\1=", "\n".join(lines)).replace("${BASH_SOURCE[0]}", "$0")
    quoted = " ".join("'" + value.replace("'", "'\\''") + "'" for value in positional)
    environment = {name: value for name, value in variables.items() if name.isidentifier() and name != "PATH"}
    program = f"POSITIONAL=({quoted})\n{_PRELUDE}\n{body}"
    try:
        done = subprocess.run(
            ["/bin/bash", "-c", _START, name, program],
            env={"HOME": "/root", "USER": "user", **environment},
            cwd=directory,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_SECONDS,
            check=False,
        )
        output, errors, status = done.stdout, done.stderr, done.returncode
    except subprocess.TimeoutExpired as expired:  # it waits for a server, in a loop
        output, errors, status = expired.stdout or b"", expired.stderr or b"", 0
    records = output.decode(errors="replace").split("\x1e\0")
    commands = [record.removesuffix("\0").split("\0") for record in records if record]
    said = errors.decode(errors="replace").strip()
    if missing := _UNSET.search(said):
        return commands, UnsetVariableError(missing[1])
    ended = f"the script ends with status {status} before it starts any training: "
    return commands, ScriptEndedError(ended + said.rpartition("\n")[2]) if status and said else None


def _training(arguments: Sequence[str], variables: Mapping[str, str], directory: Path | None) -> list[Command]:
    """The training command among these arguments, which may begin with a launcher, or nest one in quotes."""
    nested = [text for text in arguments[1:] if re.search(r"python[\d.]*\s", text) and "python" not in arguments[0]]
    for text in nested:
        if commands_of_file := training_commands(text, variables, directory):
            return commands_of_file
    for index, argument in enumerate(arguments):
        rest = list(arguments[index + 1 :])
        devices: tuple[str, ...] = ()
        if re.fullmatch(r"(?:.*/)?python[\d.]*|torchrun", argument):
            if argument == "torchrun":
                devices, rest = _torchrun(rest)
            while rest and rest[0].startswith("-") and rest[0] != "-m":
                del rest[: 2 if rest[0] in ("-X", "-W") else 1]
            if rest and rest[0] == "-m":
                rest.pop(0)
        else:
            continue
        command = Command(rest[0], tuple(rest[1:]), devices) if rest else None
        return [command] if command is not None and command.overrides else []
    return []


def _torchrun(words: Sequence[str]) -> tuple[tuple[str, ...], list[str]]:
    """The nodes and devices among torchrun's options, as settings of ours, and what comes after the options.

    A number of devices that torchrun finds itself, like `gpu`, is left out, and so is a range of nodes.
    """
    devices: list[str] = []
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] not in ("-m", "--module"):
        name, separator, value = rest.pop(0).lstrip("-").replace("_", "-").partition("=")
        if not separator and name not in _TORCHRUN_SWITCHES and rest:
            value = rest.pop(0)
        if name in _TORCHRUN and value.isdecimal():
            devices.append(f"{_TORCHRUN[name]}={value}")
    return tuple(devices), rest
