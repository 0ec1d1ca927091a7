"""Samples trajectories: engines produce the policy's turns, environments answer them."""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cached_property, partial
from itertools import groupby
from operator import attrgetter
from typing import Any

from jinja2 import TemplateError

from trainer.algorithms.truncation import WHOLE, Truncation
from trainer.config.tree import Config
from trainer.data.dataset import Prompt
from trainer.errors import ConfigError
from trainer.experience.conversations.agents import Agents
from trainer.experience.conversations.calls import Calls, Failure, call_each
from trainer.experience.environment import (
    ConversationEnvironment,
    MessageTokens,
    Observation,
    Program,
    Turn,
    checked,
)
from trainer.experience.programs.host import Programs
from trainer.experience.trajectory import Trajectory
from trainer.rewards.answer import Answer
from trainer.rewards.scores import as_scored, failed_score
from trainer.rollout.engines import Engines
from trainer.rollout.sampling import Response

logger = logging.getLogger(__name__)

_GLANCE = 0.1  # seconds between two looks at environments and programs

Sampled = list[tuple[Trajectory, Response]]


class Conversations:
    """Makes trajectories with a run's engines, and with its environment if it has one."""

    def __init__(self, config: Config, engines: Engines, tokenizer: Any) -> None:
        self._config = config
        self._engines = engines
        self._tokenizer = tokenizer
        self._changed = threading.Event()
        self._agents = Agents(config, tokenizer, self._changed)
        rollout = config.rollout
        self._answers = Calls[Trajectory](rollout.environment_timeout, rollout.environment_calls, self._changed)
        self._in_flight: dict[int, Trajectory] = {}
        self._sampling = ThreadPoolExecutor(1, "segment")
        self._homes = 0
        self._warned: set[str] = set()
        if self._agents.has_tools:
            self._check_template()

    def begin(
        self,
        prompts: Sequence[Prompt],
        seeds: Sequence[int],
        temperature: float,
        truncation: Truncation = WHOLE,
        with_log_probs: bool = True,
        with_routes: bool = False,
    ) -> list[Trajectory]:
        """An empty trajectory for each prompt, with an environment that was reset to it."""
        limit = self._config.data.max_response_length
        pairs = list(zip(prompts, seeds, strict=True))
        rows = [
            Trajectory(
                prompt.token_ids,
                temperature,
                seed,
                limit,
                truncation=truncation,
                with_log_probs=with_log_probs,
                with_routes=with_routes,
                task=prompt,
            )
            for prompt, seed in pairs
        ]
        self._give_homes(rows)
        answered = [place for place, prompt in enumerate(prompts) if self._agents.answer(prompt)]
        opened = self._call_each([partial(self._agents.open, *pairs[place]) for place in answered])
        for place, environment in zip(answered, opened, strict=True):
            if isinstance(environment, Failure):
                self._fail(rows[place], environment)
            else:
                rows[place].environment = environment
        return rows

    def _give_homes(self, rows: Sequence[Trajectory]) -> None:
        """Rows of one prompt share an engine, whose cache then has the prompt and all turns of each conversation."""
        for _, group in groupby(rows, key=attrgetter("prompt")):
            self._homes += 1
            for row in group:
                row.home = self._homes

    def finish(self, rows: Sequence[Trajectory]) -> None:
        """Continues all trajectories until they are done."""
        while active := [row for row in rows if not row.done]:
            self.advance(active)

    def advance(self, rows: Sequence[Trajectory], most: int | None = None) -> None:
        """Extends trajectories by at most `most` tokens: those in which it is the policy's turn. Turns that end go to
        their environments and programs, whose answers later calls take; without any turn, waits a moment for them.

        With engines that sample in flight, trajectories of earlier calls that are not done are extended, too.
        """
        version = self._engines.version
        self._changed.clear()  # before looking: what happens from now on ends the next wait
        extend = self._continued if self._flies(rows) else self._extended
        for row, response in self._meanwhile(partial(extend, self._speaking(rows), most), rows):
            row.add(response, version)
            if isinstance(row.environment, Program):
                self._programs.heard(row, response.ended)
            elif response.ended and row.environment is not None:
                row.answering, row.done = True, False  # the answer ends it, also where no token is left
                self._answers.begin(row, partial(self._step, row.environment, row.turn))
            else:
                row.done |= response.ended

    def _flies(self, rows: Sequence[Trajectory]) -> bool:
        """Whether responses stay in flight between calls: in asynchronous runs, and where turns end one by one."""
        if not self._engines.in_flight:
            return False
        asynchronous = self._config.trainer.mode == "asynchronous"
        return asynchronous or bool(self._in_flight) or any(row.environment is not None for row in rows)

    def _extended(self, rows: Sequence[Trajectory], most: int | None) -> Sampled:
        """The rows, each with tokens of a request of its own."""
        if not rows:
            return []
        homes = [row.home for row in rows] if any(row.environment is not None for row in rows) else None
        requests = [row.request(self._most(row, most)) for row in rows]
        responses = self._engines.generate(requests, homes)
        return list(zip(rows, responses, strict=True))

    def _continued(self, rows: Sequence[Trajectory], most: int | None) -> Sampled:
        """These rows and all that are in flight, as far as they got new tokens."""
        flying = self._in_flight
        flying |= {id(row): row for row in rows}
        if not flying:
            return []
        # Also those that an engine lost: it was replaced, or it slept.
        held = self._engines.under_way
        new = {number: row for number, row in flying.items() if number not in held}
        parts = self._engines.advance(
            {number: row.request(self._room(row)) for number, row in new.items()},
            most or self._config.rollout.segment_length,
            {number: row.home for number, row in new.items() if row.environment is not None},
        )
        sampled: Sampled = [(flying[number], part) for number, part in parts.items()]
        self._in_flight = {n: row for n, row in flying.items() if n not in parts or not parts[n].finished}
        return sampled

    def _meanwhile(self, sample: Callable[[], Sampled], rows: Sequence[Trajectory]) -> Sampled:
        """What the engines sample; takes answers while they do, so that they need not wait for that later."""
        if not any(row.environment is not None or row.answering for row in rows):
            return sample()
        sampled = self._sampling.submit(sample)
        self._take_answers(rows)
        while wait([sampled], _GLANCE).not_done:
            self._take_answers(rows)
        return sampled.result()

    def _take_answers(self, rows: Sequence[Trajectory]) -> None:
        """Continues the conversations whose environments have answered, or whose programs have asked or ended."""
        for row, answer in self._answers.finished():
            row.answering = False
            if isinstance(answer, Failure):
                self._fail(row, answer)
            elif isinstance(answer, Observation):
                self._take(row, answer)
            else:
                row.environment = answer  # of another attempt
        if played := _played(rows):
            self._programs.update(played)
            for row in played:
                self._try_again(row)

    def _speaking(self, rows: Sequence[Trajectory]) -> list[Trajectory]:
        """The rows in which it is the policy's turn. Where there is none, and none in flight, waits a moment."""
        if not (speaking := self._with_a_turn(rows)) and not self._in_flight:
            self._take_answers(rows)
            speaking = self._with_a_turn(rows)
            if rows and not speaking:
                self._warn_of_limits(_played(rows))
                self._answers.wait(_GLANCE)
        return speaking

    def _with_a_turn(self, rows: Sequence[Trajectory]) -> list[Trajectory]:
        if self._config.trainer.deterministic and (self._in_flight or any(row.answering for row in rows)):
            return []  # turn by turn: else the order of answers would decide what an engine computes together
        return [row for row in rows if not row.done and _policy_speaks(row)]

    def _warn_of_limits(self, played: Sequence[Trajectory]) -> None:
        """Says once if the engines stand still while tools or programs wait for a place."""
        waiting = self._programs.waiting(played) if played else 0
        for setting, kept in (("environment_calls", self._answers.waiting), ("program.processes", waiting)):
            if kept and setting not in self._warned:
                self._warned.add(setting)
                logger.warning(
                    "the engines stand still while %d conversations wait for a place (rollout.%s=%d)",
                    kept,
                    setting,
                    attrgetter(setting)(self._config.rollout),
                )

    def _most(self, row: Trajectory, most: int | None) -> int | None:
        """Tokens to sample at once. Turns that somebody answers come in segments, so that others can join between
        them."""
        if row.environment is None:
            return most
        segment = most or self._config.rollout.segment_length
        room = self._room(row)
        return segment if room is None else min(segment, room)

    def _room(self, row: Trajectory) -> int | None:
        """Tokens left of a program's turn; None where the trajectory is the limit."""
        return self._programs.room(row) if isinstance(row.environment, Program) else None

    @property
    def _programs(self) -> Programs:
        assert self._agents.programs is not None
        return self._agents.programs

    def close(self) -> None:
        """Ends all programs, and the threads of environments after their calls."""
        self._sampling.shutdown()
        self._answers.close()
        if self._agents.programs is not None:
            self._agents.programs.close()

    def _take(self, row: Trajectory, answer: Observation) -> None:
        if answer.score is not None:
            row.scored = as_scored(answer.score, Answer(self.text(row.turn), ""))
        row.done |= answer.done or row.turns == self._config.rollout.max_turns
        row.answers += bool(answer.done and answer.messages)
        if not row.done:
            try:
                rendered = self._tokens(answer.messages, row.turn[-1]) if answer.messages else []
            except (TemplateError, ValueError) as error:
                self._fail(row, Failure(f"the chat template rejects its messages: {error}"))
                return
            row.observe([*rendered, *answer.token_ids])

    def _check_template(self) -> None:
        """Raises ConfigError if the chat template cannot write what tools say."""
        try:
            self._tokens([{"role": "tool", "content": "19"}], self._tokenizer.eos_token_id)
        except (TemplateError, ValueError) as error:
            raise ConfigError(
                f"the model's chat template cannot write the answer of a tool: {error}",
                hint="set data.chat_template to a template with the role tool",
            ) from error

    @cached_property
    def _tokens(self) -> MessageTokens:
        return MessageTokens(self._tokenizer, self._config.data)

    @cached_property
    def _vocabulary(self) -> int:
        """Tokens that the tokenizer knows. tokenizers 0.22 takes 80 ms to count 152,000; other threads wait."""
        return len(self._tokenizer)

    def _step(self, environment: ConversationEnvironment, token_ids: Sequence[int]) -> Observation:
        return checked(environment.step(Turn(self.text(token_ids), tuple(token_ids))), self._vocabulary)

    def _call_each(self, calls: Sequence[Any]) -> list[Any]:
        return call_each(calls, self._config.rollout.environment_timeout)

    def _fail(self, row: Trajectory, failure: Failure) -> None:
        """Marks the trajectory as failed. One without a turn still needs tokens: the policy answers its prompt."""
        row.scored = failed_score(self._config.reward, "environment_error", f"environment: {failure.reason}")
        row.done = bool(row.token_ids)
        row.environment = row.environment if row.done else None
        self._try_again(row)

    def _try_again(self, row: Trajectory) -> None:
        """Begins a failed trajectory again, `rollout.retries` times at most."""
        failed = row.scored
        if failed is None or failed.cause is None or len(row.retried) == self._config.rollout.retries:
            return
        if failed.cause not in self._warned:
            self._warned.add(failed.cause)
            logger.warning("a response failed and is sampled again (%s): %s", failed.cause, failed.failure)
        row.begin_again()
        assert row.task is not None
        row.answering = True
        self._answers.begin(row, partial(self._agents.open, row.task, row.seed))

    def text(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))


def _played(rows: Sequence[Trajectory]) -> list[Trajectory]:
    """The rows with a program."""
    return [row for row in rows if isinstance(row.environment, Program)]


def _policy_speaks(row: Trajectory) -> bool:
    return not row.answering and (not isinstance(row.environment, Program) or row.environment.asking)
