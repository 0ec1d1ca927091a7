"""A process that calls a reward function. The pool starts it: `python -m trainer.rewards.process SOCKET`.

It receives the settings, then lists of `Answer`, and sends a `Reply` to each answer. Output of the function goes to
standard error.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from trainer.config.reward import RewardConfig
from trainer.errors import TrainerError
from trainer.rewards.answer import Answer, Reply
from trainer.rewards.function import Reward, batched_function, reward_function
from trainer.rewards.scores import as_scored

Replies = Callable[[Sequence[Answer]], Iterator[Reply]]


def serve(connection: "Connection[Any, Any]") -> None:
    """Scores answers until the other end closes."""
    try:
        replies = _replies(connection.recv())
    except TrainerError as error:
        connection.send(Reply(refusal=(str(error), error.hint)))
        return
    connection.send(Reply())
    while True:
        try:
            answers = connection.recv()
        except EOFError:
            return
        for reply in replies(answers):
            connection.send(reply)


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
        yield from (Reply(failure=f"{type(error).__name__}: {error}") for _ in answers)
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
        return Reply(failure=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    serve(Connection(int(sys.argv[1])))
