"""All programs of a run: started as places become free, each at its own pace."""

import logging
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

from trainer.config.tree import Config
from trainer.data.dataset import Prompt
from trainer.errors import WorkerError
from trainer.experience.call_format import CallFormat
from trainer.experience.environment import MessageTokens, Program
from trainer.experience.programs.conversation import ProgramConversation
from trainer.experience.programs.endpoint import Endpoint, Line
from trainer.experience.programs.hub import HubConversation, HubProcess
from trainer.experience.programs.process import Ended, ProgramProcess, command_of
from trainer.experience.programs.wire import BadRequestError
from trainer.experience.trajectory import Trajectory
from trainer.rewards.answer import Cause
from trainer.rewards.scores import failed_score

logger = logging.getLogger(__name__)

_HANDS = 4  # threads that start programs, answer them, and remove their files
# Programs for each core that start at once, and the seconds after which one that has not asked counts as started:
# a thousand that load their libraries at once would all take longer than their patience.
_STARTS_PER_CORE, _START_SECONDS = 4, 2.0


@dataclass
class Running:
    """A program that was started. It must ask or end before `deadline`, unless it waits for an answer."""

    line: Line
    process: ProgramProcess | HubConversation
    deadline: float
    has_asked: bool = False
    answer: Future[None] | None = None


class ProgramAgent(Program):
    """A trajectory's program."""

    def __init__(self, prompt: Prompt, conversation: ProgramConversation) -> None:
        super().__init__()
        self.prompt = prompt
        self.conversation = conversation
        self.running: Running | None = None


class Programs:
    """Runs the programs of all trajectories that have one, or the conversations of a hub's environment. One thread,
    which samples, calls every public method.

    Raises ConfigError if there is no such program.
    """

    def __init__(self, config: Config, tokenizer: Any, call_format: CallFormat, changed: threading.Event) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._format = call_format
        rollout = config.rollout
        self._patience = rollout.environment_timeout
        self._hub = HubProcess(rollout.environment, self._patience, changed) if rollout.environment.hub else None
        if self._hub is None:
            command_of(rollout.program)
        self._most = rollout.environment_calls if self._hub else rollout.program.processes
        self._changed = changed
        self._running: dict[ProgramAgent, Running] = {}
        # Starts, answers and the removal of files take milliseconds, for which engines would wait.
        self._hands = ThreadPoolExecutor(_HANDS, "programs")
        self._starting: dict[ProgramAgent, Future[Running]] = {}
        self._most_starts = _STARTS_PER_CORE * len(os.sched_getaffinity(0))
        self._noted: set[str] = set()

    def agent(self, prompt: Prompt) -> ProgramAgent:
        """The program of a new trajectory, not yet started."""
        tokens = self._message_tokens
        conversation = ProgramConversation(self._config, self._tokenizer, tokens, self._format)
        return ProgramAgent(prompt, conversation)

    def update(self, rows: Sequence[Trajectory]) -> None:
        """Takes new requests, notices programs that ended or hang, and starts others in their places."""
        agents = [(row, _agent_of(row)) for row in rows]
        for row, agent in agents:
            if agent in self._starting and self._starting[agent].done():
                self._take_start(row, agent, self._starting.pop(agent))
            if agent.running is not None and not agent.asking:
                self._look_at(row, agent, agent.running)
        for agent in islice(filter(self._waits, (agent for _, agent in agents)), self._places()):
            starting = self._hands.submit(self._start, agent, self._endpoint.open(self._changed))
            starting.add_done_callback(lambda _: self._changed.set())
            self._starting[agent] = starting

    def _places(self) -> int:
        """Programs that may start now."""
        latest = time.monotonic() + self._patience - _START_SECONDS
        loading = sum(not running.has_asked and running.deadline > latest for running in self._running.values())
        return max(0, min(self._free, self._most_starts - len(self._starting) - loading))

    @property
    def _free(self) -> int:
        return self._most - len(self._running) - len(self._starting)

    def waiting(self, rows: Sequence[Trajectory]) -> int:
        """Programs of these rows that wait until others end."""
        if self._free > 0:
            return 0
        return sum(map(self._waits, map(_agent_of, rows)))

    def room(self, row: Trajectory) -> int:
        """Tokens left of the turn that the policy is in."""
        agent = _agent_of(row)
        return row.limit - len(row.token_ids) if agent.over else agent.conversation.room(row)

    def heard(self, row: Trajectory, ended: bool) -> None:
        """Answers the program if the policy's turn is complete; `ended`: by the policy itself."""
        agent = _agent_of(row)
        running = agent.running
        if running is None:
            row.done |= ended
        elif row.done and self._hub is None:  # no room for another turn
            self._answer(row, agent, running, ended)
            agent.asking = False
            self._end(agent)
        elif ended or agent.conversation.room(row) == 0:
            agent.asking = row.done = False  # an environment scores also what the limit has cut
            running.deadline = time.monotonic() + self._patience
            running.answer = self._hands.submit(self._answer, row, agent, running, ended)

    def _answer(self, row: Trajectory, agent: ProgramAgent, running: Running, ended: bool) -> None:
        """Answers the program with the turn. In a thread, nobody else touches the trajectory until it asks again."""
        running.line.answer(agent.conversation.end_turn(row, ended))

    def close(self) -> None:
        """Ends all programs and the endpoint."""
        for agent, starting in self._starting.items():
            if not starting.cancel() and starting.exception() is None:
                self._running[agent] = agent.running = starting.result()
        self._starting.clear()
        for agent in list(self._running):
            self._end(agent)
        self._hands.shutdown()
        if self._hub is not None:
            self._hub.close()
        if "_endpoint" in vars(self):
            self._endpoint.close()

    def _waits(self, agent: ProgramAgent) -> bool:
        """Whether the program waits for a place."""
        return agent.running is None and not agent.over and agent not in self._starting

    @cached_property
    def _endpoint(self) -> Endpoint:
        return Endpoint(self._most)

    @cached_property
    def _message_tokens(self) -> MessageTokens:
        return MessageTokens(self._tokenizer, self._config.data)

    def _start(self, agent: ProgramAgent, line: Line) -> Running:
        """Starts a program, in a thread."""
        process: ProgramProcess | HubConversation
        try:
            if self._hub is not None:
                process = self._hub.begin(agent.prompt, line)
            else:
                process = ProgramProcess(self._config.rollout.program, agent.prompt, line)
        except (OSError, ValueError):
            self._endpoint.drop(line)
            raise
        return Running(line, process, time.monotonic() + self._patience)

    def _take_start(self, row: Trajectory, agent: ProgramAgent, start: Future[Running]) -> None:
        try:
            self._running[agent] = agent.running = start.result()
        except OSError as error:
            raise WorkerError(
                f"rollout.program.command cannot be started: {error}", hint="lower rollout.program.processes"
            ) from error
        except ValueError as error:
            self._fail(row, agent, f"its command cannot hold the question: {error}")

    def _look_at(self, row: Trajectory, agent: ProgramAgent, running: Running) -> None:
        if running.answer is not None:
            if not running.answer.done():
                return
            running.answer = running.answer.result()  # raises what went wrong
        ended = running.process.ended()  # before the request: a program that has ended asks no more
        request = running.line.take()
        if request is not None:
            running.has_asked = True
            self._note(request.ignored)
            try:
                agent.conversation.begin_turn(row, request)
                agent.asking = True
            except BadRequestError as refusal:
                running.line.answer(refusal)
                running.deadline = time.monotonic() + self._patience
            if row.done and self._hub is None:
                self._end(agent)
            row.done &= agent.over
        elif ended is not None:
            self._take_end(row, agent, running, ended)
        elif time.monotonic() > running.deadline:
            self._fail(row, agent, f"no request and no end within {self._patience:g} s")

    def _take_end(self, row: Trajectory, agent: ProgramAgent, running: Running, ended: Ended) -> None:
        """Keeps the trajectory of a program that ended well, with the score that it gave itself."""
        if ended.failure:
            refusal = f", after the refusal {running.line.refusal!r}" if running.line.refusal else ""
            self._fail(row, agent, f"{ended.failure}{refusal}")
        elif not row.token_ids:
            self._fail(row, agent, "it ended without asking the policy")
        else:
            row.scored = ended.scored
            row.done = True
            self._end(agent)

    def _fail(self, row: Trajectory, agent: ProgramAgent, reason: str) -> None:
        """Marks the trajectory as failed. One without a turn still needs tokens: the policy answers its prompt."""
        cause: Cause = "environment_error" if self._hub else "program_error"
        row.scored = failed_score(self._config.reward, cause, f"{cause.partition('_')[0]}: {reason}")
        row.done = bool(row.token_ids)
        agent.failed, agent.asking = True, not row.done
        self._end(agent)

    def _end(self, agent: ProgramAgent) -> None:
        agent.over = True
        if agent.running is not None:
            self._endpoint.drop(agent.running.line)
            agent.running.process.kill()
            self._hands.submit(agent.running.process.clear)
            agent.running = None
            del self._running[agent]

    def _note(self, ignored: Sequence[str]) -> None:
        for name in ignored:
            if name not in self._noted:
                self._noted.add(name)
                logger.warning("programs ask for %s, which has no effect: the settings of rollout decide", name)


def _agent_of(row: Trajectory) -> ProgramAgent:
    assert isinstance(row.environment, ProgramAgent)
    return row.environment
