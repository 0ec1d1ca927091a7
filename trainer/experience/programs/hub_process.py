"""The process of a hub's environment: `python -m trainer.experience.programs.hub_process HUB NAME ARGUMENTS`.

It reads a JSON message a line on standard input and writes such lines to standard output; what the environment prints
goes to standard error. It may run under another Python than the trainer: only the standard library is imported here.

    {"tasks": SPLIT}                                     {"tasks": [{"prompt", "ground_truth"}, …]}
    {"play": ID, "split", "row", "url", "key", "model"}  {"played": ID, "score", "numbers"} or {"played": ID, "failure"}
    {"cancel": ID}                                       {"played": ID, "failure"}

Before all others comes {"opened": true} or {"refused": [MESSAGE, HINT]}. It ends when its input does.
"""

import asyncio
import json
import math
import os
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainer.experience.hub import HubEnvironment, HubRow, Policy, UnusableEnvironmentError
from trainer.rows import find_rows

Say = Callable[[Mapping[str, Any]], None]


def main() -> None:
    hub, name, arguments = sys.argv[1:]
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # an environment may print
    sys.path.append(str(Path.cwd()))

    def say(message: Mapping[str, Any]) -> None:
        channel.write(json.dumps(message, default=str) + "\n")

    environment = _opened(find_rows("trainer.experience.hubs", HubRow)[hub], name, json.loads(arguments), say)
    if environment is not None:
        asyncio.run(_serve(environment, say))
    os._exit(0)  # threads and servers of an environment end with their process


def _opened(row: HubRow, name: str, arguments: dict[str, Any], say: Say) -> HubEnvironment | None:
    try:
        environment = row.open(name, **arguments)
    except UnusableEnvironmentError as error:
        say({"refused": [str(error), error.hint]})
    except ModuleNotFoundError as error:
        if error.name == row.name:
            say(
                {
                    "refused": [
                        f"{row.name} is not installed for {sys.executable}",
                        f"python -m venv HUB && HUB/bin/pip install '{row.package}', and "
                        "rollout.environment.python=HUB/bin/python",
                    ]
                }
            )
        else:
            say({"refused": [f"it needs {error.name}, which {sys.executable} lacks", f"pip install {error.name}"]})
    except Exception as error:  # noqa: BLE001 - the environment's own code
        say({"refused": [f"{type(error).__name__}: {error}", "check its name and rollout.environment.arguments"]})
    else:
        say({"opened": True})
        return environment
    return None


async def _serve(environment: HubEnvironment, say: Say) -> None:
    """Answers messages until there are no more."""
    messages: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def read() -> None:
        for line in sys.stdin:
            loop.call_soon_threadsafe(messages.put_nowait, json.loads(line))
        loop.call_soon_threadsafe(messages.put_nowait, None)

    threading.Thread(target=read, daemon=True).start()
    playing: dict[str, asyncio.Task[None]] = {}
    while (message := await messages.get()) is not None:
        if "tasks" in message:
            tasks = environment.tasks(message["tasks"])
            say({"tasks": [{"prompt": list(task.prompt), "ground_truth": task.ground_truth} for task in tasks]})
        elif "play" in message:
            number = message["play"]
            playing[number] = asyncio.create_task(_play(environment, message, say))
            playing[number].add_done_callback(lambda _, number=number: playing.pop(number))  # type: ignore[misc]
        elif (task := playing.get(message["cancel"])) is not None:
            task.cancel()


async def _play(environment: HubEnvironment, message: Mapping[str, Any], say: Say) -> None:
    played = {"played": message["play"]}
    policy = Policy(message["url"], message["key"], message["model"])
    try:
        outcome = await environment.play(message["split"], message["row"], policy)
    except asyncio.CancelledError:
        say({**played, "failure": "cancelled"})
    except Exception as error:  # noqa: BLE001 - the environment's own code
        say({**played, "failure": f"{type(error).__name__}: {error}"[:1000]})
    else:
        numbers = {name: float(value) for name, value in outcome.numbers.items() if _is_finite(value)}
        score = float(outcome.score) if _is_finite(outcome.score) else None
        failure = {} if score is not None else {"failure": f"its score is {outcome.score!r:.60}, not a finite number"}
        say({**played, "score": score, "numbers": numbers, **failure})


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


if __name__ == "__main__":
    main()
