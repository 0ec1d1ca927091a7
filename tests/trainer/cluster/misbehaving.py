"""A worker that fails in various ways, for test_workers.py."""

import os
import time

from trainer.cluster.place import Team
from trainer.errors import DataError


class Worker:
    def __init__(self, *problems: str) -> None:
        if "constructor" in problems:
            raise DataError("no model here", hint="put one there")

    def echo(self, word: str) -> str:
        return word

    def remember(self, word: str) -> str | None:
        self.word = word
        return self.environment("SLIPWAY_TEST")

    def remembered(self) -> str:
        return self.word

    def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    def die(self, word: str) -> str:
        if word == "now":
            os._exit(1)
        return word

    def lose_a_peer(self, word: str) -> str:
        """One rank dies; the other notices first, as a collective would."""
        if word == "dies":
            time.sleep(1)
            os._exit(1)
        raise RuntimeError("connection closed by peer")

    def fail(self) -> None:
        raise RuntimeError("something odd")

    def refuse(self) -> None:
        raise DataError("bad data", hint="use good data")

    def sleep(self) -> None:
        time.sleep(60)


class Collective(Worker):
    """A rank of a process group over Gloo, of which one comes late or never."""

    def __init__(self, rank: int, size: int, store: str) -> None:
        from torch import distributed

        super().__init__()
        distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
        self.rank = rank

    def pid(self) -> int:
        return os.getpid()

    def meet(self) -> None:
        """A sum over all ranks."""
        import torch
        from torch import distributed

        distributed.all_reduce(torch.ones(4))

    def meet_late(self, late: int) -> None:
        if self.rank == late:
            self.load_something_slow()
        self.meet()

    def load_something_slow(self) -> None:
        time.sleep(60)

    def meet_after_endless_work(self, busy: int) -> None:
        while self.rank == busy:
            pass
        self.meet()


class Member(Worker):
    """A worker that knows its team."""

    def __init__(self, team: Team) -> None:
        super().__init__()
        self.team = team

    def own_team(self) -> Team:
        return self.team

    def die_or_wait(self) -> None:
        """The second process of the team dies; the others wait for it, as in a collective."""
        if self.team.rank == 1:
            os._exit(1)
        time.sleep(600)
