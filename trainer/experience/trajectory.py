"""A response while it is sampled: the policy's turns and the environment's messages between them."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import compress

from trainer.algorithms.truncation import WHOLE, Truncation
from trainer.data.batches.routes import Segment
from trainer.data.dataset import Prompt
from trainer.experience.environment import ConversationEnvironment, Program
from trainer.rewards.answer import Cause, Scored
from trainer.rollout.sampling import Response, SamplingRequest, retry_seed


@dataclass
class Trajectory:
    """Everything after the prompt, up to `limit` tokens. One turn of the policy's without an environment. The first
    request of a program replaces the prompt.

    `mask`, `log_probs` and `versions` have an entry per token: whether the policy sampled it, with which log-prob (0.0
    where it did not, or without `with_log_probs`), and after how many updates of the weights. `answers` counts the
    environment's turns; `answering` means that it is at work on one. `home` numbers the engine that samples all turns,
    modulo the number of engines. `scored` is set once an environment has given a score, or failed. `truncated` means
    that the limit ended the response. `routes` are the experts that tokens of prompt and response chose in the engine,
    recorded with `with_routes`. `retried` holds the causes of earlier attempts, which failed.
    """

    prompt: tuple[int, ...]
    temperature: float
    seed: int
    limit: int
    token_ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    turn_start: int = 0
    turns: int = 0
    answers: int = 0
    done: bool = False
    truncated: bool = False
    home: int = 0
    answering: bool = False
    environment: ConversationEnvironment | Program | None = None
    scored: Scored | None = None
    truncation: Truncation = WHOLE
    with_log_probs: bool = True
    with_routes: bool = False
    routes: list[Segment] = field(default_factory=list)
    task: Prompt | None = None
    retried: tuple[Cause, ...] = ()

    def request(self, most: int | None = None) -> SamplingRequest:
        """The request for an engine to continue this response by at most `most` tokens."""
        room = self.limit - len(self.token_ids)
        return SamplingRequest(
            (*self.prompt, *self.token_ids),
            self.temperature,
            # Each segment has its own seed; the first has the response's.
            self.seed + len(self.token_ids),
            min(room, most or room),
            self.truncation,
            self.with_log_probs,
            begun=len(self.turn),
            record_from=max((part.end for part in self.routes), default=0) if self.with_routes else None,
        )

    def add(self, response: Response, version: int) -> bool:
        """Appends an engine's tokens; True if they end the policy's turn."""
        count = len(response.token_ids)
        self.token_ids += response.token_ids
        self.mask += [True] * count
        self.log_probs += response.log_probs or [0.0] * count
        self.versions += [version] * count
        self.routes += response.routes
        self.done = len(self.token_ids) == self.limit
        self.truncated = self.done and not response.ended
        self.turns += response.ended or self.done
        return response.ended or self.done

    def begin_again(self) -> None:
        """Becomes empty, with another seed, after an attempt that failed."""
        assert self.task is not None
        assert self.scored is not None
        assert self.scored.cause is not None
        self.retried = (*self.retried, self.scored.cause)
        self.prompt, self.seed = self.task.token_ids, retry_seed(self.seed)
        self.token_ids, self.mask, self.log_probs, self.versions, self.routes = [], [], [], [], []
        self.turn_start = self.turns = self.answers = 0
        self.done = self.truncated = False
        self.scored = None

    def copy(self) -> "Trajectory":
        """This response as it is now."""
        return replace(
            self,
            token_ids=list(self.token_ids),
            mask=list(self.mask),
            log_probs=list(self.log_probs),
            versions=list(self.versions),
            routes=list(self.routes),
        )

    @property
    def turn(self) -> Sequence[int]:
        """The tokens of the policy's last turn."""
        return self.token_ids[self.turn_start :]

    def observe(self, token_ids: Sequence[int]) -> None:
        """Appends the environment's tokens and starts the policy's next turn. Without room for a turn after them, ends
        the response instead: tokens that the policy cannot answer teach nothing."""
        if len(self.token_ids) + len(token_ids) >= self.limit:
            self.done = self.truncated = True
            return
        self.token_ids += token_ids
        self.mask += [False] * len(token_ids)
        self.log_probs += [0.0] * len(token_ids)
        self.versions += [self.versions[-1]] * len(token_ids)
        self.turn_start = len(self.token_ids)
        self.answers += 1

    @property
    def sampled(self) -> list[int]:
        """The policy's own tokens."""
        return list(compress(self.token_ids, self.mask))
