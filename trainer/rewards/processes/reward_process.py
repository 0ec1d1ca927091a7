"""The pool's handle of a reward process."""

import os
import secrets
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from fnmatch import fnmatchcase
from socket import socketpair

from trainer.config.sections.reward import RewardConfig
from trainer.errors import ConfigError
from trainer.rewards.answer import Answer, Reply
from trainer.rewards.function import time_limit
from trainer.rewards.processes.channel import BrokenChannelError, Channel
from trainer.rewards.processes.memory import available_memory

START_SECONDS = 120.0  # the user's file may import a lot
# The variables that a reward function gets. None of them holds a token or a key.
_VARIABLES = (
    *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_*", "TZ", "TMPDIR", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "PYTHON*"),
    *("*_NUM_THREADS", "*_VISIBLE_DEVICES", "TOKENIZERS_PARALLELISM", "NO_COLOR"),
    *("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "XDG_CACHE_HOME", "SLIPWAY_CACHE_DIR"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE"),
)


class RewardProcess:
    """One process, which scores the answers of a message one after the other, in a process group of its own."""

    def __init__(self, settings: RewardConfig) -> None:
        """Starts it, without waiting until it is ready."""
        ours, theirs = socketpair()
        memory = int(settings.process_memory_gib * 2**30) if settings.process_memory_gib else available_memory() // 2
        with theirs:
            command = [sys.executable, "-m", "trainer.rewards.processes.process", str(theirs.fileno()), str(memory)]
            self._process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=environment(os.environ, settings.variables),
                start_new_session=True,
            )
        self.channel = Channel(ours)
        self._settings = settings
        self.ready = False
        self.pending: deque[tuple[int, Answer]] = deque()
        self._numbers: deque[str] = deque()
        self.deadline = time.monotonic() + START_SECONDS
        with suppress(BrokenChannelError):  # `replies` reports it
            self.channel.send(settings.model_dump(mode="json"))

    @property
    def busy(self) -> bool:
        return bool(self.pending) or not self.ready

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def send(self, answers: Sequence[tuple[int, Answer]]) -> None:
        """Sends answers to score, each with its row. Raises BrokenChannelError, DataError."""
        numbers = [secrets.token_hex(8) for _ in answers]
        self.channel.send([[number, asdict(answer)] for number, (_, answer) in zip(numbers, answers, strict=True)])
        self.pending.extend(answers)
        self._numbers.extend(numbers)
        self._set_deadline()

    def replies(self) -> Iterator[tuple[int, Reply]]:
        """The row of each pending answer whose reply has arrived, and the reply.

        Raises BrokenChannelError if the process died or wrote anything else, ConfigError if the function cannot be
        loaded.
        """
        while (message := self.channel.poll()) is not None:
            try:
                reply, number = Reply.from_json(message), message.get("number")
            except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
                raise BrokenChannelError(f"wrote {str(message)[:80]}") from error
            if not self.ready:
                if reply.refusal:
                    raise ConfigError(*reply.refusal)
                self.ready = True
            elif not self._numbers or number != self._numbers[0]:
                raise BrokenChannelError("wrote an unexpected reward")
            else:
                self._numbers.popleft()
                row, _ = self.pending.popleft()
                self._set_deadline()
                yield row, reply

    def kill(self) -> None:
        """Ends the process and everything that it started in its group."""
        self.channel.close()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _set_deadline(self) -> None:
        batched = self._settings.custom_function.batched
        counted = [answer for _, answer in self.pending][: None if batched else 1]
        self.deadline = time.monotonic() + sum(time_limit(self._settings, answer) for answer in counted)


def environment(ours: Mapping[str, str], named: Sequence[str]) -> dict[str, str]:
    """The variables of a reward process: those that hold no secrets, and those that the user named."""
    patterns = (*_VARIABLES, *named)
    return {name: value for name, value in ours.items() if any(fnmatchcase(name, pattern) for pattern in patterns)}
