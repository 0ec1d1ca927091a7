"""A response while it is being made: what the policy sampled, and what an environment put between."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress

from trainer.experience.environment import ConversationEnvironment
from trainer.rewards.answer import Scored
from trainer.rollout.sampling import Response, SamplingRequest


@dataclass
class Trajectory:
    """Everything after the prompt, up to `limit` tokens. One turn of the policy's without an environment.

    `mask`, `log_probs` and `versions` have an entry per token: whether the policy sampled it, with which log-prob (0.0
    where it did not, or where engines leave it out), and after how many updates of the weights. `scored` is set once
    an environment has given a score, or failed.
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
    done: bool = False
    environment: ConversationEnvironment | None = None
    scored: Scored | None = None

    def request(self, most: int | None = None) -> SamplingRequest:
        """What is asked of an engine next: to go on where this ends, by at most so many tokens."""
        room = self.limit - len(self.token_ids)
        return SamplingRequest(
            (*self.prompt, *self.token_ids),
            self.temperature,
            # Each piece has random numbers of its own; the first those of the response.
            self.seed + len(self.token_ids),
            min(room, most or room),
        )

    def add(self, response: Response, version: int) -> bool:
        """Takes what an engine sampled; whether the policy's turn is over with it."""
        count = len(response.token_ids)
        self.token_ids += response.token_ids
        self.mask += [True] * count
        self.log_probs += response.log_probs or [0.0] * count
        self.versions += [version] * count
        self.done = len(self.token_ids) == self.limit
        self.turns += response.ended or self.done
        return response.ended or self.done

    @property
    def turn(self) -> Sequence[int]:
        """The tokens of the policy's last turn."""
        return self.token_ids[self.turn_start :]

    def observe(self, token_ids: Sequence[int]) -> None:
        """Appends what an environment says, and the policy's next turn begins. Ends here where that leaves no room:
        words that nothing answers have nothing to teach."""
        if len(self.token_ids) + len(token_ids) >= self.limit:
            self.done = True
            return
        self.token_ids += token_ids
        self.mask += [False] * len(token_ids)
        self.log_probs += [0.0] * len(token_ids)
        self.versions += [self.versions[-1]] * len(token_ids)
        self.turn_start = len(self.token_ids)

    @property
    def sampled(self) -> list[int]:
        """The policy's own tokens."""
        return list(compress(self.token_ids, self.mask))
