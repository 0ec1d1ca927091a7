"""Conversations that failed begin again. The policy says tokens that follow from prompt and seed alone."""

import logging
import random
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainer.config.tree import Config
from trainer.data.dataset import Prompt
from trainer.experience.conversations.agents import Agents
from trainer.experience.conversations.sampler import Conversations
from trainer.experience.environment import ConversationEnvironment, Observation, Turn
from trainer.experience.trajectory import Trajectory
from trainer.models.small import build_tokenizer
from trainer.rollout.sampling import Response, SamplingRequest

LIMIT = 12


class SeededEngines:
    """Each response follows from its prompt and its seed."""

    version = 0
    in_flight = False

    def generate(self, requests: Sequence[SamplingRequest], homes: Sequence[int] | None) -> list[Response]:
        del homes
        return [self._response(request) for request in requests]

    def _response(self, request: SamplingRequest) -> Response:
        draws = random.Random(f"{request.prompt} {request.seed}")
        wanted, room = draws.randint(1, 4), request.max_tokens or LIMIT
        words = tuple(draws.randint(1, 4) for _ in range(min(wanted, room)))
        return Response(words, tuple(-0.5 for _ in words), ended=wanted <= room)


class Game:
    """Two turns, for each of which the policy earns its tokens. `fails` says which attempts at a prompt end how."""

    attempts: ClassVar[Counter[int]] = Counter()
    fails: Callable[[int, int], str] = staticmethod(lambda _prompt, _attempt: "")

    def reset(self, prompt: Prompt, seed: int) -> None:
        del seed
        self._left, self._fails = 2, Game.fails(prompt.index, Game.attempts[prompt.index])
        Game.attempts[prompt.index] += 1
        if self._fails == "reset":
            raise ConnectionError("refused")

    def step(self, turn: Turn) -> Observation:
        self._left -= 1
        if self._fails == "step" and not self._left:
            raise ConnectionError("lost")
        return Observation(token_ids=[1], done=not self._left, score=float(sum(turn.token_ids)))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer(["1 2 3 4"])


@pytest.fixture(autouse=True)
def _game(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Agents, "answer", lambda _agents, _prompt: True)

    def opened(_agents: Agents, prompt: Prompt, seed: int) -> ConversationEnvironment:
        game = Game()
        game.reset(prompt, seed)
        return game

    monkeypatch.setattr(Agents, "open", opened)


def played(
    tokenizer: Any, retries: int, seeds: Sequence[int], fails: Callable[[int, int], str] = lambda *_: ""
) -> list[Trajectory]:
    """A conversation per seed; `fails` gives the method that fails in an attempt at a prompt, "" for none."""
    Game.attempts, Game.fails = Counter(), staticmethod(fails)
    config = Config.model_validate({"rollout": {"retries": retries}, "data": {"max_response_length": LIMIT}})
    prompts = [Prompt(number, (1, number + 2), "", "", "") for number in range(len(seeds))]
    engines: Any = SeededEngines()
    with closing(Conversations(config, engines, tokenizer)) as conversations:
        rows = conversations.begin(prompts, seeds, temperature=1.0)
        conversations.finish(rows)
    return rows


def content(row: Trajectory) -> tuple[Any, ...]:
    """All that a step learns from."""
    return row.prompt, row.token_ids, row.mask, row.log_probs, row.versions, row.scored, row.truncated, row.turns


seeds = st.lists(st.integers(0, 2**50), min_size=1, max_size=4)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seeds=seeds, retries=st.integers(1, 3))
def test_retries_change_nothing_without_failures(tokenizer: Any, seeds: list[int], retries: int) -> None:
    without, allowed = played(tokenizer, 0, seeds), played(tokenizer, retries, seeds)
    assert [content(row) for row in allowed] == [content(row) for row in without]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seeds=seeds, retries=st.integers(0, 3), failures=st.integers(0, 4), how=st.sampled_from(["reset", "step"]))
def test_a_response_that_fails_is_sampled_again_and_no_other_one_changes(
    tokenizer: Any, seeds: list[int], retries: int, failures: int, how: str
) -> None:
    def fails(prompt: int, attempt: int) -> str:
        return how if prompt == 0 and attempt < failures else ""

    undisturbed = played(tokenizer, 0, seeds)
    rows, again = played(tokenizer, retries, seeds, fails), played(tokenizer, retries, seeds, fails)
    assert [content(row) for row in rows[1:]] == [content(row) for row in undisturbed[1:]]
    assert [content(row) for row in rows] == [content(row) for row in again]  # as in a resumed run
    row = rows[0]
    # A conversation that the limit cuts before its second turn does not reach the step that fails.
    attempts = Game.attempts[0]
    assert row.retried == ("environment_error",) * (attempts - 1)
    assert attempts <= min(failures, retries) + 1
    if how == "reset":
        assert attempts == min(failures, retries) + 1
        assert (row.scored is not None and row.scored.cause is not None) == (failures > retries)
    assert row.token_ids  # each row of a batch has some
    if row.scored is None or row.scored.cause is None:  # nothing is left of earlier attempts
        (alone,) = played(tokenizer, 0, [row.seed])
        assert content(row) == content(alone)


def test_another_attempt_has_another_seed_that_follows_from_the_first(tokenizer: Any) -> None:
    rows = [played(tokenizer, 3, [7, 8], lambda _, attempt, n=n: "reset" * (attempt < n)) for n in range(4)]
    seeds = [[row.seed for row in attempt] for attempt in rows]
    assert len({seed for pair in seeds for seed in pair}) == 8
    assert seeds[0] == [7, 8]


def test_the_log_names_the_first_failure_of_a_cause(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        played(tokenizer, 1, [1, 2, 3], lambda _prompt, attempt: "reset" * (attempt == 0))
    (line,) = [record.getMessage() for record in caplog.records if "sampled again" in record.getMessage()]
    assert line.endswith("(environment_error): environment: ConnectionError: refused")
