"""What is measured: time in which the engine was busy, tokens that were read twice, and how conversations ended."""

import math
import os
import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Self

from benchmarks.conversations.engine import Call, Recorder
from trainer.experience.conversations.tool_agent import ToolAgent
from trainer.experience.trajectory import Trajectory


class Watch:
    """Looks at this process: when each conversation was done, its most memory in MiB, and its most threads."""

    def __init__(self, rows: Sequence[Trajectory]) -> None:
        self._rows = rows
        self._ended = threading.Event()
        self.begin = self.end = time.monotonic()
        self.done: dict[int, float] = {}
        self.memory, self.threads = 0.0, 0
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._note()
        self.end = time.monotonic()

    def _look(self) -> None:
        while not self._ended.wait(0.1):
            self._note()

    def _note(self) -> None:
        now = time.monotonic()
        self.done |= {place: now for place, row in enumerate(self._rows) if row.done and place not in self.done}
        self.memory = max(self.memory, resident_mib())
        self.threads = max(self.threads, threading.active_count())

    def when(self, share: float) -> float:
        """The time at which this share of the conversations was done."""
        return sorted(self.done.values())[math.ceil(share * len(self.done)) - 1]


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def busy(calls: Sequence[Call], begin: float, end: float, least: int = 1) -> float:
    """The share of the time in which the engine decoded at least so many sequences."""
    total = 0.0
    for call in calls:
        seconds = max(0.0, min(call.end, end) - max(call.begin, begin))
        total += seconds * mean([running >= least for running in call.running] or [least == 1])
    return round(total / (end - begin), 3)


def retokenised(rows: Sequence[Trajectory], recorder: Recorder) -> int:
    """Tokens that a conversation has otherwise than the engine sampled or read them."""
    wrong = 0
    for number, asked in recorder.by_conversation().items():
        row = rows[number]
        whole = (*row.prompt, *row.token_ids)
        sampled = [token for call in asked for token in call.token_ids]
        wrong += _differences(row.sampled, sampled)
        wrong += sum(_differences(whole[: len(call.request.prompt)], call.request.prompt) for call in asked)
    return wrong


def _differences(left: Sequence[int], right: Sequence[int]) -> int:
    return abs(len(left) - len(right)) + sum(token != other for token, other in zip(left, right, strict=False))


def prefilled(recorder: Recorder) -> dict[str, int]:
    """Tokens of prompts that were submitted, those computed, and those that had to be: the first prompts, and of later
    ones what was not computed before, in whole blocks of the cache. A turn's last token is sampled, but never read."""
    submitted = computed = minimum = 0
    for asked in recorder.by_conversation().values():
        for call in asked:
            submitted += len(call.request.prompt)
            computed += len(call.request.prompt) - call.cached
        minimum += len(asked[0].request.prompt)
        for before, after in pairwise(asked):
            known = len(before.request.prompt) + len(before.token_ids) - 1
            minimum += len(after.request.prompt) - known // recorder.block * recorder.block
    return {"submitted": submitted, "computed": computed, "minimum": minimum}


def outcome(row: Trajectory) -> str:
    """How a conversation ended, for the counts."""
    if row.scored is not None and row.scored.failure:
        return f"{row.scored.failure[:60]} after {row.turns} turns"
    failed = row.environment.failed_calls if isinstance(row.environment, ToolAgent) else 0
    return f"{row.turns} turns" + (f", {failed} failed call" if failed else "")
