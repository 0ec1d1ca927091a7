"""The process of a program, in a clean environment and a process group of its own."""

import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from trainer.config.sections.rollout import ProgramConfig
from trainer.data.dataset import Prompt
from trainer.errors import ConfigError
from trainer.experience.programs.endpoint import MODEL, Line
from trainer.rewards.answer import Scored
from trainer.rewards.sandbox.sandboxed import remove
from trainer.rewards.scores import is_finite

_MOST_OUTPUT = 2**16
_KEPT = ("PATH", "LANG", "LC_ALL", "TZ")


@dataclass(frozen=True)
class Ended:
    """How a program ended: well, maybe with a score of its own, or with a `failure`."""

    failure: str = ""
    scored: Scored | None = None


class ProgramProcess:
    """A program that runs. Its task is on standard input, as JSON without the ground truth.

    Raises OSError if this machine cannot start it, ValueError if its command cannot hold the question.
    """

    def __init__(self, settings: ProgramConfig, prompt: Prompt, line: Line) -> None:
        # Files without a path: the program can put no others in their place.
        self._out, self._err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 - closed by `clear`
        self._folder = Path(tempfile.mkdtemp(prefix="program-"))
        try:
            self._process = self._started(settings, prompt, line)
        except (OSError, ValueError):
            self._remove_files()
            raise

    def _started(self, settings: ProgramConfig, prompt: Prompt, line: Line) -> subprocess.Popen[bytes]:
        task = {
            "messages": list(prompt.chat),
            "question": prompt.question,
            "data_source": prompt.data_source,
            "extra_info": dict(prompt.extra_info),
        }
        with tempfile.TemporaryFile() as stdin:
            stdin.write(json.dumps(task, default=str).encode())
            stdin.seek(0)
            return subprocess.Popen(
                [part.replace("{question}", prompt.question) for part in command_of(settings)],
                cwd=self._folder,
                env=_environment(settings.environment, line, self._folder),
                stdin=stdin,
                stdout=self._out,
                stderr=self._err,
                start_new_session=True,
            )

    def ended(self) -> Ended | None:
        """How it ended; None while it runs."""
        status = self._process.poll()
        if status is None:
            return None
        if status != 0:
            return Ended(f"status {status}: {self._last_error()}")
        try:
            score = self._score()
        except ValueError as error:
            return Ended(str(error))
        return Ended(scored=None if score is None else Scored(score))

    def _score(self) -> float | None:
        """The score in its last line of output, `{"score": NUMBER}`; None without. Raises ValueError for nonsense."""
        lines = _end_of(self._out).strip().splitlines()
        try:
            last = json.loads(lines[-1]) if lines else None
        except (ValueError, RecursionError):
            return None
        if not isinstance(last, dict) or "score" not in last:
            return None
        score = last["score"]
        if isinstance(score, bool) or not is_finite(score):
            raise ValueError(f"its score is {score!r:.60}, not a finite number")
        return float(score)

    def _last_error(self) -> str:
        """Its last line on standard error."""
        lines = _end_of(self._err).strip().splitlines()
        return lines[-1][:300] if lines else ""

    def kill(self) -> None:
        """Kills the program with all that it started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def clear(self) -> None:
        """Waits for its end, and removes its files."""
        self._process.wait()
        self._remove_files()

    def _remove_files(self) -> None:
        self._out.close()
        self._err.close()
        remove(self._folder)


def _end_of(output: IO[bytes]) -> str:
    """The end of an output. Its position is left to the program, which may still write."""
    size = os.fstat(output.fileno()).st_size
    return os.pread(output.fileno(), _MOST_OUTPUT, max(0, size - _MOST_OUTPUT)).decode(errors="replace")


def command_of(settings: ProgramConfig) -> Sequence[str]:
    """The command with absolute paths: programs start in directories of their own. Raises ConfigError if there is
    none to start."""
    program = shutil.which(settings.command[0]) if settings.command else None
    if program is None:
        raise ConfigError(
            f"rollout.program.command={list(settings.command)}: no such program",
            hint="set it to a program and its arguments, like [python, agent.py]",
        )
    arguments = [str(Path(part).absolute()) if Path(part).is_file() else part for part in settings.command[1:]]
    return [str(Path(program).absolute()), *arguments]


def _environment(given: Mapping[str, str], line: Line, home: Path) -> dict[str, str]:
    """None of the run's variables but a few: they may hold keys."""
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    client = {"OPENAI_BASE_URL": line.url, "OPENAI_API_BASE": line.url, "OPENAI_API_KEY": line.token}
    return {**kept, "HOME": str(home), "TMPDIR": str(home), "OPENAI_MODEL": MODEL, **client, **given}
