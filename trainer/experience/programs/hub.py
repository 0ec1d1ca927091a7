"""The process of a hub's environment, as the run sees it: one process plays all conversations side by side."""

import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from trainer.config.sections.rollout import EnvironmentConfig
from trainer.data.dataset import Prompt
from trainer.errors import ConfigError
from trainer.experience.programs.endpoint import MODEL, Line
from trainer.experience.programs.process import Ended
from trainer.rewards.answer import Scored

ROOT = Path(__file__).parents[3]
OPEN_SECONDS = 600.0  # an environment may download its data set
_CLOSE_SECONDS = 5.0
_LINES = 20  # of standard error that are kept


class HubConversation:
    """A conversation that the environment plays; it has the interface of `ProgramProcess`."""

    def __init__(self, cancel: Callable[["HubConversation"], None]) -> None:
        self._cancel = cancel
        self._ended: Ended | None = None

    def end(self, ended: Ended) -> None:
        self._ended = self._ended or ended

    def ended(self) -> Ended | None:
        """How it ended; None while it is played."""
        return self._ended

    def kill(self) -> None:
        """Ends the conversation, if it is played."""
        if self._ended is None:
            self._cancel(self)

    def clear(self) -> None:
        """Nothing is left of a conversation."""


class HubProcess:
    """Starts the environment's process; a process that died or hangs is replaced when the next conversation begins.

    `changed` is set whenever a conversation ends. A conversation that does not end within `patience` seconds after it
    was cancelled shows that the process hangs. Raises ConfigError if there is no such Python.
    """

    def __init__(self, settings: EnvironmentConfig, patience: float, changed: threading.Event | None = None) -> None:
        assert settings.hub is not None
        self._setting = f"rollout.environment={settings.hub}"
        self._command = _command(settings)
        self._patience, self._changed = patience, changed or threading.Event()
        self._lock, self._writing = threading.Lock(), threading.Lock()
        self._numbers = count()
        self._start()

    def _start(self) -> None:
        self._opened = threading.Event()
        self._refusal: tuple[str, str] | None = None
        self._answers: queue.SimpleQueue[list[dict[str, Any]]] = queue.SimpleQueue()
        self._playing: dict[str, HubConversation] = {}
        self._cancelled: dict[str, float] = {}
        self._errors: deque[str] = deque(maxlen=_LINES)
        self._process = subprocess.Popen(
            self._command,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            text=True,
            errors="replace",
        )
        self._readers = [threading.Thread(target=read, daemon=True) for read in (self._read, self._read_errors)]
        for reader in self._readers:
            reader.start()

    def tasks(self, split: str) -> list[dict[str, Any]]:
        """The rows of a split. Raises ConfigError if the environment does not open, or has none."""
        self._wait_until_open()
        self._say({"tasks": split})
        try:
            rows = self._answers.get(timeout=OPEN_SECONDS)
        except queue.Empty:
            rows = []
        if not rows:
            raise ConfigError(
                f"{self._setting} has no rows for {split}",
                hint=f"give its data set rows; its last line of standard error: {self._last_error()}",
            )
        return rows

    def begin(self, prompt: Prompt, line: Line) -> HubConversation:
        """Begins a conversation about a row of the environment, which asks the policy over `line`."""
        with self._lock:
            if self._process.poll() is not None or self._hangs():
                self.close()
                self._start()
            conversation = HubConversation(self._cancel)
            try:
                self._wait_until_open()
            except ConfigError as error:
                conversation.end(Ended(str(error)))
                return conversation
            number = str(next(self._numbers))
            self._playing[number] = conversation
        row = {"split": prompt.extra_info.get("split"), "row": prompt.extra_info.get("row")}
        self._say({"play": number, **row, "url": line.url, "key": line.token, "model": MODEL})
        return conversation

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(0 if self._hangs() else _CLOSE_SECONDS)
        with suppress(ProcessLookupError):  # with all that the environment started
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for reader in self._readers:
            reader.join(_CLOSE_SECONDS)

    def _hangs(self) -> bool:
        return any(time.monotonic() - since > self._patience for since in list(self._cancelled.values()))

    def _wait_until_open(self) -> None:
        """Raises ConfigError if the environment refuses to open, ends, or takes too long."""
        if not self._opened.wait(OPEN_SECONDS):
            raise ConfigError(f"{self._setting} did not open within {OPEN_SECONDS:g} s", hint="try it on its own")
        if self._refusal is not None:
            message, hint = self._refusal
            raise ConfigError(f"{self._setting} cannot be opened: {message}", hint=hint)

    def _say(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        # `_read` sees the end of the process, too, and ends all conversations.
        with self._writing, suppress(BrokenPipeError, ValueError):
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()

    def _cancel(self, conversation: HubConversation) -> None:
        for number, playing in list(self._playing.items()):
            if playing is conversation:
                self._cancelled[number] = time.monotonic()
                self._say({"cancel": number})

    def _read(self) -> None:
        """Takes what the process says until it ends, in a thread."""
        assert self._process.stdout is not None
        with self._process.stdout as said:
            for line in said:
                message = json.loads(line)
                if "played" in message:
                    self._cancelled.pop(message["played"], None)
                    self._playing.pop(message["played"]).end(_ended(message))
                    self._changed.set()
                elif "tasks" in message:
                    self._answers.put(message["tasks"])
                else:
                    self._refusal = message.get("refused")
                    self._opened.set()
        status = self._process.wait()
        if not self._opened.is_set():
            self._refusal = (f"its process ended with status {status}: {self._last_error()}", "repair the environment")
            self._opened.set()
        for conversation in list(self._playing.values()):
            conversation.end(Ended(f"its process ended with status {status}: {self._last_error()}"))
        self._answers.put([])
        self._changed.set()

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as errors:
            self._errors.extend(line.strip() for line in errors if line.strip())

    def _last_error(self) -> str:
        return self._errors[-1][:300] if self._errors else "it wrote no error"


def _ended(message: Mapping[str, Any]) -> Ended:
    if failure := message.get("failure"):
        return Ended(failure)
    return Ended(scored=Scored(message["score"], info=message["numbers"]))


def _command(settings: EnvironmentConfig) -> list[str]:
    assert settings.hub is not None
    python = shutil.which(settings.python or sys.executable)
    if python is None:
        raise ConfigError(
            f"rollout.environment.python={settings.python}: no such program",
            hint="name the Python that the environment's packages are installed for, like /opt/hub/bin/python",
        )
    hub, _, name = settings.hub.partition(":")
    return [python, "-P", "-m", "trainer.experience.programs.hub_process", hub, name, json.dumps(settings.arguments)]
