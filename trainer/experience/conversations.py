"""Samples trajectories: engines produce the policy's turns, environments answer them."""

from collections.abc import Iterable, Sequence
from functools import cached_property, partial
from typing import Any

from jinja2 import TemplateError

from trainer.algorithms.truncation import WHOLE, Truncation
from trainer.config.tree import Config
from trainer.data.dataset import Prompt
from trainer.errors import ConfigError
from trainer.experience.agents import Agents
from trainer.experience.environment import (
    ConversationEnvironment,
    Failure,
    Message,
    MessageTokens,
    Observation,
    Turn,
    call_each,
)
from trainer.experience.programs.host import ProgramAgent, Programs
from trainer.experience.trajectory import Trajectory
from trainer.rewards.answer import Answer, Scored
from trainer.rewards.scores import as_scored
from trainer.rollout.engines import Engines
from trainer.rollout.sampling import Response


class Conversations:
    """Makes trajectories with a run's engines, and with its environment if it has one."""

    def __init__(self, config: Config, engines: Engines, tokenizer: Any) -> None:
        self._config = config
        self._engines = engines
        self._tokenizer = tokenizer
        self._agents = Agents(config, tokenizer)
        self._in_flight: dict[int, Trajectory] = {}
        if self._agents.has_tools:
            self._check_template()

    def begin(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], temperature: float, truncation: Truncation = WHOLE
    ) -> list[Trajectory]:
        """An empty trajectory for each prompt, with an environment that was reset to it."""
        limit = self._config.data.max_response_length
        pairs = list(zip(prompts, seeds, strict=True))
        rows = [Trajectory(prompt.token_ids, temperature, seed, limit, truncation=truncation) for prompt, seed in pairs]
        answered = [place for place, prompt in enumerate(prompts) if self._agents.answer(prompt)]
        opened = self._call_each([partial(self._agents.open, *pairs[place]) for place in answered])
        for place, environment in zip(answered, opened, strict=True):
            if isinstance(environment, Failure):
                self._fail(rows[place], environment)  # the policy still takes its first turn, without an answer
            else:
                rows[place].environment = environment
        return rows

    def finish(self, rows: Sequence[Trajectory]) -> None:
        """Continues all trajectories until they are done."""
        while active := [row for row in rows if not row.done]:
            self.advance(active)

    def advance(self, rows: Sequence[Trajectory], most: int | None = None) -> None:
        """Extends each trajectory by at most `most` tokens; environments answer the turns that end.

        With engines that sample in flight, trajectories of earlier calls that are not done are extended, too.
        """
        version = self._engines.version
        speaking = self._speaking(rows)
        extend = self._continued if self._engines.in_flight else self._extended
        ended: list[tuple[Trajectory, ConversationEnvironment]] = []
        for row, response in extend(speaking, most):
            row.add(response, version)
            if isinstance(row.environment, ProgramAgent):
                self._programs.heard(row, row.environment, response.ended)
            elif response.ended and row.environment is not None:
                ended.append((row, row.environment))
            else:
                row.done |= response.ended
        answers = self._call_each([partial(self._step, environment, row.turn) for row, environment in ended])
        for (row, _), answer in zip(ended, answers, strict=True):
            self._take(row, answer)

    def _extended(self, rows: Sequence[Trajectory], most: int | None) -> Iterable[tuple[Trajectory, Response]]:
        """The rows, each with tokens of a request of its own."""
        if not rows:
            return []
        homes = [row.environment.number for row in rows if isinstance(row.environment, ProgramAgent)]
        requests = [row.request(self._most(row, most)) for row in rows]
        responses = self._engines.generate(requests, homes if len(homes) == len(rows) else None)
        return zip(rows, responses, strict=True)

    def _continued(self, rows: Sequence[Trajectory], most: int | None) -> Iterable[tuple[Trajectory, Response]]:
        """These rows and all that are in flight, as far as they got new tokens."""
        flying = self._in_flight
        flying |= {id(row): row for row in rows}
        if not flying:
            return []
        # Also those that an engine lost: it was replaced, or it slept.
        new = {number: row for number, row in flying.items() if number not in self._engines.under_way}
        parts = self._engines.advance(
            {number: row.request(self._room(row)) for number, row in new.items()},
            most or self._config.rollout.segment_length,
            {n: row.environment.number for n, row in new.items() if isinstance(row.environment, ProgramAgent)},
        )
        found = [(flying[number], part) for number, part in parts.items()]
        self._in_flight = {n: row for n, row in flying.items() if n not in parts or not parts[n].finished}
        return found

    def _speaking(self, rows: Sequence[Trajectory]) -> Sequence[Trajectory]:
        """The rows in which it is the policy's turn. If all wait for their programs, there are none, after a moment."""
        played = [row for row in rows if isinstance(row.environment, ProgramAgent)]
        if not played:
            return rows
        self._programs.update(played)
        speaking = [row for row in rows if not row.done and _policy_speaks(row)]
        if not speaking:
            self._programs.wait()
        return speaking

    def _most(self, row: Trajectory, most: int | None) -> int | None:
        """Tokens to sample at once. Turns for programs come in segments, so that others can join between them."""
        room = self._room(row)
        return most if room is None else min(most or self._config.rollout.segment_length, room)

    def _room(self, row: Trajectory) -> int | None:
        """Tokens left of a program's turn; None where the trajectory is the limit."""
        return self._programs.room(row, row.environment) if isinstance(row.environment, ProgramAgent) else None

    @property
    def _programs(self) -> Programs:
        assert self._agents.programs is not None
        return self._agents.programs

    def close(self) -> None:
        """Ends all programs."""
        if self._agents.programs is not None:
            self._agents.programs.close()

    def _take(self, row: Trajectory, answer: Observation | Failure) -> None:
        if isinstance(answer, Failure):
            self._fail(row, answer)
            row.done = True
            return
        if answer.score is not None:
            row.scored = as_scored(answer.score, Answer(self.text(row.turn), ""))
        row.done |= answer.done or row.turns == self._config.rollout.max_turns
        row.answers += bool(answer.done and answer.messages)
        if not row.done:
            row.observe(
                [*self._rendered(row, answer.messages), *answer.token_ids] if answer.messages else answer.token_ids
            )

    def _check_template(self) -> None:
        """Raises ConfigError if the chat template cannot write what tools say."""
        try:
            self._tokens([{"role": "tool", "content": "19"}])
        except (TemplateError, ValueError) as error:
            raise ConfigError(
                f"the model's chat template cannot write the answer of a tool: {error}",
                hint="set data.chat_template to a template with the role tool",
            ) from error

    @cached_property
    def _tokens(self) -> MessageTokens:
        return MessageTokens(self._tokenizer, self._config.data)

    def _rendered(self, row: Trajectory, messages: Sequence[Message]) -> list[int]:
        """The tokens of the environment's messages. A stop string ends a turn without an end token, so they start with
        it."""
        text = str(self._tokenizer.decode(row.turn))
        return self._tokens(messages, turn_is_closed=not any(stop in text for stop in self._config.rollout.stop))

    def _step(self, environment: ConversationEnvironment, token_ids: Sequence[int]) -> Observation:
        answer = environment.step(Turn(self.text(token_ids), tuple(token_ids)))
        if not isinstance(answer, Observation):
            raise TypeError(f"step returned {type(answer).__name__}, not an Observation")
        return answer

    def _call_each(self, calls: Sequence[Any]) -> list[Any]:
        return call_each(calls, self._config.rollout.environment_timeout)

    def _fail(self, row: Trajectory, failure: Failure) -> None:
        """Gives the trajectory the score of a failed reward; the run continues."""
        row.scored = Scored(self._config.reward.failure_score, f"environment: {failure.reason}")

    def text(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))


def _policy_speaks(row: Trajectory) -> bool:
    return not isinstance(row.environment, ProgramAgent) or row.environment.asking
