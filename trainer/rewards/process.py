"""A process that calls a reward function. The pool starts it: `python -m trainer.rewards.process SOCKET`.

It receives the settings, then one `Answer` at a time, and sends a `Reply` to each. Output of the function goes to
standard error.
"""

import os
import sys
from multiprocessing.connection import Connection
from typing import Any

from trainer.errors import RewardError, TrainerError
from trainer.rewards.answer import Reply
from trainer.rewards.function import as_score, reward_function


def serve(connection: "Connection[Any, Any]") -> None:
    """Scores answers until the other end closes."""
    try:
        reward = reward_function(connection.recv())
    except TrainerError as error:
        connection.send(Reply(refusal=(str(error), error.hint)))
        return
    connection.send(Reply())
    while True:
        try:
            answer = connection.recv()
        except EOFError:
            return
        try:
            reply = Reply(as_score(reward(answer), answer))
        except RewardError as error:
            reply = Reply(refusal=(str(error), error.hint))
        except Exception as error:  # noqa: BLE001 - a user's function may raise anything; it costs one sample
            reply = Reply(failure=f"{type(error).__name__}: {error}")
        connection.send(reply)


if __name__ == "__main__":
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    serve(Connection(int(sys.argv[1])))
