"""A process that calls a reward function. The pool starts it: `python -m trainer.rewards.processes.process SOCKET`.

It receives the settings, then lists of answers, each with a number that nobody can guess, and sends a reply with that
number to each answer. Output of the function goes to standard error.
"""

import ctypes
import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from trainer.cluster.stalls.stacks import open_stack_file
from trainer.config.sections.reward import RewardConfig
from trainer.errors import TrainerError
from trainer.rewards.answer import Answer, Cause, Reply
from trainer.rewards.function import Reward, batched_function, reward_function
from trainer.rewards.processes.channel import BrokenChannelError, Channel
from trainer.rewards.sandbox.programs import SandboxError
from trainer.rewards.scores import as_scored

Replies = Callable[[Sequence[Answer]], Iterator[Reply]]

_PDEATHSIG = 1
_LONGEST_TRACEBACK = 4000  # characters
_OURS = Path(__file__).parents[2]  # the trainer's modules


def serve(channel: Channel) -> None:
    """Scores answers until the other end closes."""
    try:
        replies = _replies(RewardConfig.model_validate(channel.receive()))
    except TrainerError as error:
        channel.send(Reply(refusal=(str(error), error.hint)).to_json())
        return
    channel.send(Reply().to_json())
    while True:
        try:
            numbered = channel.receive()
        except BrokenChannelError:
            return
        numbers = [number for number, _ in numbered]
        answers = [Answer(**fields) for _, fields in numbered]
        for number, reply in zip(numbers, replies(answers), strict=True):
            channel.send({"number": number, **reply.to_json()})


def confine(memory: int) -> None:
    """Limits this process: `memory` bytes of its own, no core files, first to end when the node's memory is short, and
    ended with the process that started it."""
    for limit, value in ((resource.RLIMIT_DATA, memory), (resource.RLIMIT_CORE, 0)):
        most = resource.getrlimit(limit)[1]
        value = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(limit, (value, value))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("800")
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)


def _replies(settings: RewardConfig) -> Replies:
    """The function that answers a message. Raises ConfigError if the user's function cannot be loaded."""
    if settings.custom_function.batched:
        return partial(_together, batched_function(settings))
    return partial(_one_by_one, reward_function(settings))


def _one_by_one(reward: Reward, answers: Sequence[Answer]) -> Iterator[Reply]:
    for answer in answers:
        yield _guarded(partial(reward, answer), answer)


def _together(score_all: Callable[[Sequence[Answer]], Sequence[Any]], answers: Sequence[Answer]) -> Iterator[Reply]:
    try:
        scores = score_all(answers)
    except TrainerError as error:
        yield from (Reply(refusal=(str(error), error.hint)) for _ in answers)
    except Exception as error:  # noqa: BLE001 - a user's function may raise anything; it costs these samples
        yield from (_failed(error) for _ in answers)
    else:
        for score, answer in zip(scores, answers, strict=True):
            yield _guarded(partial(_same, score), answer)


def _same(score: Any) -> Any:
    return score


def _guarded(score: Callable[[], Any], answer: Answer) -> Reply:
    try:
        return Reply(as_scored(score(), answer))
    except TrainerError as error:
        return Reply(refusal=(str(error), error.hint))
    except Exception as error:  # noqa: BLE001 - a user's function may raise anything; it costs one sample
        return _failed(error)


def _failed(error: Exception) -> Reply:
    """The failure, its cause, and the traceback of the user's own frames."""
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None and _is_ours(frames):
        frames = frames.tb_next
    written = "".join(traceback.format_exception(type(error), error, frames))
    cause: Cause = "reward_sandbox" if isinstance(error, SandboxError) else "reward_error"
    return Reply(failure=f"{type(error).__name__}: {error}", traceback=written[-_LONGEST_TRACEBACK:], cause=cause)


def _is_ours(frames: TracebackType) -> bool:
    return Path(frames.tb_frame.f_code.co_filename).is_relative_to(_OURS)


def main() -> None:
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    number, memory = map(int, sys.argv[1:])
    channel = Channel(socket.socket(fileno=number))
    os.register_at_fork(after_in_child=channel.close)  # a child that the function forks must not answer for it
    confine(memory)
    open_stack_file()
    serve(channel)


if __name__ == "__main__":
    main()
