"""The part of `tests.stalls.nodes` that runs on the head: it injects what its standard input says, line by line."""

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from queue import Queue
from threading import Thread

from tests.chaos.injection import NotStartedError
from tests.stalls.faults import FAULTS, draw
from tests.stalls.injecting import Job, inject, stall_a_node
from tests.stalls.nodes import MARK


class OtherSide:
    """`python -m tests.stalls.nodes` at the other end of the standard streams."""

    def __init__(self) -> None:
        self.begun = 0.0
        self._orders: Queue[str] = Queue()
        Thread(target=self._read, daemon=True).start()

    def orders(self) -> Iterator[dict[str, str]]:
        """What to inject, until the other side ends."""
        while order := self._orders.get():
            self.begun = 0.0
            yield json.loads(order)

    def start(self) -> None:
        say("start")

    def end(self) -> None:
        say("end")

    def _read(self) -> None:
        for line in sys.stdin:
            if line == "begun\n":
                self.begun = time.monotonic()
            else:
                self._orders.put(line)
        self._orders.put("")


def say(word: str, value: object = None) -> None:
    sys.stdout.write(f"{MARK}{json.dumps([word, value])}\n")
    sys.stdout.flush()


def main() -> None:
    nodes, stall_seconds, other = int(sys.argv[1]), float(sys.argv[2]), OtherSide()
    try:
        with Job(Path("/shared"), nodes, stall_seconds, nodes) as job:
            say("ready", [job.address(rank) for rank in range(nodes)])
            for order in other.orders():
                (fault,) = [fault for fault in FAULTS if fault.name == order["fault"]]
                injection = draw(fault, int(order["seed"]), nodes)
                outcome = stall_a_node(job, injection, other) if fault.at == "node" else inject(job, injection)
                say("record", asdict(outcome))
    except NotStartedError as error:
        say("not started", str(error))


if __name__ == "__main__":
    main()
