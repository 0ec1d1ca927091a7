"""Conversations that are answered each in its own time. A script takes the place of the policy."""

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from trainer.config.tree import Config
from trainer.data.dataset import Prompt
from trainer.experience.conversations.calls import Calls, Failure, wait_for
from trainer.experience.conversations.sampler import Conversations
from trainer.experience.environment import Observation
from trainer.experience.trajectory import Trajectory
from trainer.models.small import build_tokenizer
from trainer.rollout.sampling import Part, Response, SamplingRequest

END = 7
# Its steps are the test's own: it finds them, by the row's question, in the module that the test has filled.
WORLD = """
from tests.trainer.experience.conversations import test_answers

class World:
    def reset(self, prompt, seed): self.name = prompt.question
    def step(self, turn): return test_answers.steps[self.name](turn)
"""
steps: dict[str, Callable[[Any], Observation]] = {}


class FakeEngines:
    """Every turn is one end token. Remembers which conversations it was asked for, by the first token of the prompt."""

    version = 0
    in_flight = False

    def __init__(self) -> None:
        self.asked: list[list[int]] = []
        self.homes: dict[int, set[int]] = {}

    def generate(self, requests: Sequence[SamplingRequest], homes: Sequence[int]) -> list[Response]:
        self.asked.append([request.prompt[0] for request in requests])
        for request, home in zip(requests, homes, strict=True):
            self.homes.setdefault(request.prompt[0], set()).add(home)
        return [Response((END,), (-0.5,), ended=True) for _ in requests]


class FakeInFlight(FakeEngines):
    """A turn takes as many calls as its prompt's second token says."""

    in_flight = True

    def __init__(self) -> None:
        super().__init__()
        self._left: dict[int, int] = {}
        self.calls = 0

    @property
    def under_way(self) -> set[int]:
        return set(self._left)

    def advance(self, new: Mapping[int, SamplingRequest], most: int, homes: Mapping[int, int]) -> dict[int, Part]:
        assert homes.keys() == new.keys()
        assert most == 64
        self.calls += 1
        self.asked.append([request.prompt[0] for request in new.values()])
        self._left |= {number: request.prompt[1] for number, request in new.items()}
        parts = {}
        for number in list(self._left):
            self._left[number] -= 1
            over = not self._left[number]
            parts[number] = Part((END if over else 1,), (-0.5,), ended=over, finished=over)
            if over:
                del self._left[number]
        return parts


@pytest.fixture
def converse(tmp_path: Path) -> Callable[..., tuple[list[Trajectory], Any]]:
    (tmp_path / "world.py").write_text(WORLD)
    tokenizer = build_tokenizer(["a b c"])

    def start(
        played: Mapping[str, Callable[[Any], Observation]],
        engines: FakeEngines | None = None,
        calls: Sequence[int] = (),
        trainer: Mapping[str, Any] | None = None,
        samples: int = 1,
        **rollout: Any,
    ) -> tuple[list[Trajectory], Any]:
        steps.clear()
        steps.update(played)
        environment = {"path": tmp_path / "world.py", "name": "World"}
        config = Config.model_validate(
            {
                "trainer": trainer or {},
                "rollout": {"environment": environment, "max_turns": 2, "environment_timeout": 20, **rollout},
                "data": {"max_response_length": 100},
            }
        )
        engines = engines or FakeEngines()
        lengths = [*calls] or [1] * len(played)
        prompts = [
            Prompt(number, (100 + number, length), "", "", name)
            for number, (name, length) in enumerate(zip(played, lengths, strict=True))
            for _ in range(samples)
        ]
        with closing(Conversations(config, engines, tokenizer)) as conversations:  # type: ignore[arg-type]
            rows = conversations.begin(prompts, range(len(prompts)), 1.0)
            conversations.finish(rows)
        return rows, engines

    return start


def says(*token_ids: int, done: bool = False) -> Observation:
    return Observation(token_ids=token_ids, done=done)


def test_conversations_do_not_wait_for_each_others_environments(converse: Callable[..., Any]) -> None:
    """The first environment answers once the second conversation has had both turns."""
    over = threading.Event()
    turns = iter([says(5), says(done=True)])

    def fast(_turn: Any) -> Observation:
        answer = next(turns)
        if answer.done:
            over.set()
        return answer

    def slow(_turn: Any) -> Observation:
        assert over.wait(10)
        return says(5)

    rows, engines = converse({"slow": slow, "fast": fast})
    assert [(row.turns, row.scored) for row in rows] == [(2, None), (2, None)]
    assert engines.asked == [[100, 101], [101], [100]]


def test_the_engines_go_on_while_environments_answer(converse: Callable[..., Any]) -> None:
    """The first conversation's answer comes once the second one's turn is over."""
    over = threading.Event()

    def slow(_turn: Any) -> Observation:
        assert over.wait(10)
        return says(5)

    def long(_turn: Any) -> Observation:
        over.set()
        return says(done=True)

    rows, _ = converse({"slow": slow, "long": long}, FakeInFlight(), calls=[1, 30])
    assert [(row.turns, row.scored) for row in rows] == [(2, None), (1, None)]
    assert rows[1].token_ids == [1] * 29 + [END]


def test_all_turns_of_a_conversation_and_all_samples_of_a_prompt_have_one_engine(converse: Callable[..., Any]) -> None:
    """Their starts are in its cache."""
    _, engines = converse(dict.fromkeys("abc", lambda _turn: says(5)), samples=2)
    assert sorted(map(len, engines.homes.values())) == [1, 1, 1]
    assert len(set.union(*engines.homes.values())) == 3


def test_a_deterministic_run_takes_turns_together(converse: Callable[..., Any]) -> None:
    def slow(_turn: Any) -> Observation:
        time.sleep(0.3)
        return says(5)

    deterministic = {"trainer": {"deterministic": True}}
    _, engines = converse({"slow": slow, "fast": lambda _turn: says(5)}, **deterministic)
    assert engines.asked == [[100, 101], [100, 101]]
    _, engines = converse({"slow": slow, "fast": lambda _turn: says(5)}, FakeInFlight(), calls=[1, 3], **deterministic)
    assert [asked for asked in engines.asked if asked] == [[100, 101], [100, 101]]


def test_a_limit_that_keeps_the_engines_idle_is_named(
    converse: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    def slow(_turn: Any) -> Observation:
        time.sleep(0.8)
        return says(5)

    converse(dict.fromkeys("abc", slow), environment_calls=3)
    assert "wait for a place" not in caplog.text
    rows, _ = converse(dict.fromkeys("abc", slow), environment_calls=1, environment_timeout=2.0)
    assert "the engines stand still while 2 conversations wait for a place (rollout.environment_calls=1)" in caplog.text
    assert caplog.text.count("wait for a place") == 1
    assert [row.scored for row in rows] == [None] * 3  # the time of a call counts from its start


def test_a_late_result_belongs_to_no_later_call() -> None:
    changed, go, now = threading.Event(), threading.Event(), [0.0]
    calls = Calls[str](5.0, 2, changed, clock=lambda: now[0])
    calls.begin("row", lambda: go.wait(60))
    assert calls.finished() == []
    now[0] = 5.0
    assert calls.finished() == [("row", Failure("no answer within 5 s"))]
    go.set()
    calls.begin("row", lambda: "new")
    finished: list[tuple[str, Any]] = []
    while not finished:
        calls.wait(1.0)
        changed.clear()
        finished += calls.finished()
    assert finished == [("row", "new")]


def test_a_coroutine_that_takes_too_long_is_cancelled() -> None:
    cancelled = threading.Event()

    async def hang() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()

    with pytest.raises(TimeoutError, match=r"no answer within 0\.1 s"):
        wait_for(hang(), 0.1)
    assert cancelled.wait(5)


def test_threads_serve_one_call_after_another_and_end_with_the_calls() -> None:
    changed = threading.Event()
    calls = Calls[int](5, 8, changed)
    before, finished = threading.enumerate(), []
    for number in range(50):
        calls.begin(number, threading.get_ident)
        while len(finished) <= number:
            calls.wait(1.0)
            changed.clear()
            finished += calls.finished()
    assert len({thread for _, thread in finished}) == 1
    (serving,) = (thread for thread in threading.enumerate() if thread not in before)
    calls.close()
    serving.join(5)
    assert not serving.is_alive()


def test_answers_are_taken_while_the_engines_sample(
    converse: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second conversation's turn lasts until the first one's answer stands in its trajectory."""
    sampling, observed = threading.Event(), threading.Event()
    observe = Trajectory.observe

    def told(row: Trajectory, token_ids: Sequence[int]) -> None:
        observe(row, token_ids)
        observed.set()

    monkeypatch.setattr(Trajectory, "observe", told)

    class Waiting(FakeInFlight):
        def advance(self, new: Mapping[int, SamplingRequest], most: int, homes: Mapping[int, int]) -> dict[int, Part]:
            if self.calls:
                sampling.set()
                assert observed.wait(10)
            return super().advance(new, most, homes)

    def slow(_turn: Any) -> Observation:
        assert sampling.wait(10)
        return says(5)

    rows, _ = converse({"slow": slow, "long": lambda _turn: says(done=True)}, Waiting(), calls=[1, 3])
    assert [row.turns for row in rows] == [2, 1]
