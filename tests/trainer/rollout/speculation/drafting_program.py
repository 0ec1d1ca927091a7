"""vLLM's schedulers with drafts, steady steps between them, and without both, side by side:
`drafting_program.py DIRECTORY`, for test_drafting.py. Writes DIRECTORY/found.json.

Requests come, end and are aborted at random, and drafts come and go. Tokens are drawn instead of computed, as vLLM's
second model runner would accept them; that runner itself needs a GPU. A cache that is too small makes vLLM take
responses back.
"""

import json
import os
import sys
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

from trainer.rollout.process_environment import engine_environment

os.environ.update(engine_environment(enforce_eager=True), HF_HUB_OFFLINE="1")

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

from tests.trainer.rollout.accounting.steady_steps_program import (
    LENGTH,
    PROMPT,
    ROUNDS,
    Play,
    computed_after,
    difference,
)
from tests.trainer.rollout.engine_program import END, make_model
from trainer.rollout.speculation.drafting import Drafting
from trainer.rollout.speculation.payoff import StepTimes

MOST = 5


def drawn(name: str, number: int) -> tuple[int, float]:
    """The token of that number of a response, and a log-prob. Most repeat themselves for a while."""
    random = Random(f"{name} {number}")
    if random.random() < (0.0, 0.005, 0.05)[int(name) % 3]:
        return END, random.random()
    repeated = 20 + (int(name) + number // 40 + number % 4) % 30
    return repeated if random.random() < 0.9 else random.randrange(20, 60), random.random()


class DraftingPlay(Play):
    """A play with tokens that repeat themselves; with `drafts` also one in which drafts come and go, and `quick` with
    the shortcut through vLLM's accounting."""

    def __init__(
        self, model: Path, kind: type[Scheduler], caching: bool, drafts: bool = True, quick: bool = True
    ) -> None:
        super().__init__(model, kind, second_runner=True, caching=caching, steady=quick)
        self.core = SimpleNamespace(scheduler=self.scheduler, batch_queue_size=self.depth)
        self.drafting = Drafting(self.core, MOST, bool, caching, self.steps) if drafts else None
        self.turned = 0

    def go_on(self) -> None:
        """Takes a step, after the engine has changed over if it wants to."""
        if self.drafting is not None and self.drafting.turns():
            self.settle()
            self.drafting.turn()
            self.turned += 1
        self.depth = self.core.batch_queue_size
        self.round()

    def _compute(self, step: Any) -> ModelRunnerOutput:
        names, computed = sorted(step.num_scheduled_tokens, reverse=True), computed_after(step)
        rows: list[tuple[int, float]] = []
        sampled, begins = [], [0]
        for name in names:
            request = self.scheduler.requests[name]
            drafts = step.scheduled_spec_decode_tokens.get(name, [])
            first = computed[name] - request.num_prompt_tokens - len(drafts)
            following = [drawn(name, first + place) for place in range(len(drafts) + 1)]
            accepted = 0
            while accepted < len(drafts) and following[accepted][0] == drafts[accepted]:
                accepted += 1
            sampled.append([] if request.is_prefill_chunk else [token for token, _ in following[: accepted + 1]])
            rows += following
            begins.append(len(rows))
        count = len(rows)
        scores = np.array([[score] for _, score in rows], np.float32)
        log_probs = LogprobsLists(np.zeros((count, 1), np.int32), scores, np.zeros(count, np.int32), begins)
        return ModelRunnerOutput(names, {name: place for place, name in enumerate(names)}, sampled, log_probs)


def play(model: Path, kind: type[Scheduler], caching: bool, seed: int) -> dict[str, Any]:
    """Plays all three until all responses have ended."""
    drafting, whole = DraftingPlay(model, kind, caching), DraftingPlay(model, kind, caching, quick=False)
    plain = DraftingPlay(model, kind, caching, drafts=False, quick=False)
    for one in (drafting, whole):
        assert one.drafting is not None
        random = Random(seed)
        one.drafting.pays = lambda random=random: random.random() < 0.7  # type: ignore[method-assign,misc]
    asked, count, different = Random(seed + 1), 0, ""
    for number in range(ROUNDS + 4 * LENGTH):
        for _ in range(asked.choice([0] * 40 + [1, 2, 8]) if number < ROUNDS else 0):
            prompt = [asked.randrange(40)] * asked.randrange(1, PROMPT)
            given = (str(count), prompt, asked.randrange(1, LENGTH), asked.random() < 0.5)
            count += 1
            for one in (drafting, whole, plain):
                one.add(*given)
        for one in (drafting, whole, plain):
            one.go_on()
        if number % 5 == 0:  # in between steady steps wait to be written
            different = different or difference(drafting.books(), whole.books())
    for one in (drafting, whole, plain):
        while one.scheduler.has_unfinished_requests():
            one.go_on()
        one.settle()
    assert drafting.drafting is not None
    assert drafting.drafting._quick is not None
    assert drafting.steps is not None
    counted = drafting.drafting.take_drafts()
    return {
        "different from vLLM's own steps": different,
        "different": [name for name, tokens in plain.tokens.items() if drafting.tokens[name] != tokens],
        "different log-probs": [name for name, found in plain.log_probs.items() if drafting.log_probs[name] != found],
        "different ends": [name for name, end in plain.ended.items() if drafting.ended[name] != end],
        "responses": len(plain.tokens),
        "turned": drafting.turned,
        "steady": drafting.steps.taken,
        "quick": drafting.drafting._quick.taken,
        "drafted": counted.drafted,
        "accepted": counted.accepted,
        "tokens": sum(map(len, plain.tokens.values())),
        "taken back": drafting.taken_back,
        "left in the cache": drafting.scheduler.kv_cache_manager.usage,
    }


class Believed(StepTimes):
    """What an engine believes that steps with drafts cost, before it drafts and while it does."""

    def __init__(self, before: float, meanwhile: float) -> None:
        super().__init__()
        self._costs = {False: before, True: meanwhile}
        self._drafting = False

    def add(self, drafting: bool, _responses: int, _seconds: float) -> None:
        self._drafting = drafting

    def cost(self, _responses: int) -> float:
        return self._costs[self._drafting]


def decided(model: Path, times: Believed) -> dict[str, float]:
    """How an engine decides by itself over 2,500 steps of twelve responses, about 1.5 tokens a step with drafts."""
    one = DraftingPlay(model, AsyncScheduler, caching=True)
    drafting = one.drafting
    assert drafting is not None
    drafting._payoff.times = times
    steps = drafting_steps = count = 0
    while steps < 2500:
        while len(one.scheduler.running) + len(one.scheduler.waiting) < 12:
            one.add(str(3 * count), [count % 40] * 30, LENGTH, log_probs=False)  # none ends early
            count += 1
        one.go_on()
        steps, drafting_steps = steps + 1, drafting_steps + drafting._on
    return {"turned": one.turned, "share": drafting_steps / steps}


def main(directory: Path) -> None:
    make_model(directory / "model")
    found: dict[str, Any] = {
        f"{kind.__name__}, prefix caching {caching}": [
            play(directory / "model", kind, caching, seed) for seed in range(2)
        ]
        for kind, caching in ((AsyncScheduler, False), (AsyncScheduler, True), (Scheduler, True))
    }
    found["cheap"] = decided(directory / "model", Believed(1.1, 1.1))
    found["dear"] = decided(directory / "model", Believed(9.0, 9.0))
    found["dearer than it seemed"] = decided(directory / "model", Believed(1.1, 9.0))
    (directory / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
