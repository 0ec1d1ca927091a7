"""Environments that answer a policy's turns, such as a tool, a game or a simulated user."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import index
from typing import Any, Protocol

from trainer.config.custom_code import CustomCode, check_method, check_parameters, load_custom
from trainer.config.sections.data import DataConfig
from trainer.data.dataset import Prompt
from trainer.data.formats.chat_template import conversation_text
from trainer.data.formats.messages import text_messages
from trainer.data.formats.turns import special_tokens
from trainer.errors import DataError

Message = Mapping[str, str]


@dataclass(frozen=True)
class Turn:
    """A turn of the policy: its tokens with the end token, and their text without special tokens."""

    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Observation:
    """What the environment answers: `messages` (role and content) in the model's chat template with the opening of the
    policy's next turn after them, or `token_ids` exactly as they are to stand there.

    `done` ends the conversation without either. `score` is then its reward; None leaves that to the run's reward, which
    gets what the policy said in all its turns.
    """

    messages: Sequence[Message] = ()
    token_ids: Sequence[int] = ()
    done: bool = False
    score: float | None = None


def checked(answer: Any, tokens: int) -> Observation:
    """The answer of an environment, with messages and numbers of plain types; `tokens` counts those of the tokenizer.

    Raises TypeError, ValueError or DataError for nonsense.
    """
    if not isinstance(answer, Observation):
        raise TypeError(f"step returned {type(answer).__name__}, not an Observation")
    messages = [dict(message) if isinstance(message, Mapping) else message for message in answer.messages]
    texts = text_messages("the observation", "messages", messages, "give each message a role and a text")
    token_ids = [index(token) for token in answer.token_ids]
    for token in token_ids:
        if not 0 <= token < tokens:
            raise ValueError(f"token_ids hold {token}, and the tokenizer knows {tokens} tokens")
    return replace(answer, messages=texts, token_ids=token_ids, done=bool(answer.done))


class ConversationEnvironment(Protocol):
    """One conversation; the class is called without arguments for each. What it raises, or takes longer for than
    `rollout.environment_timeout`, costs this conversation its reward and nothing else.

    It lives in threads of the controller: what computes for long belongs in a process or a service of its own.
    """

    def reset(self, prompt: Prompt, seed: int) -> None:
        """A new conversation about this prompt; `seed` is its own, and the same when a step is repeated."""
        ...

    def step(self, turn: Turn) -> Observation:
        """The answer to a turn of the policy that ended with an end token."""
        ...


@dataclass(eq=False)
class Program:
    """A program that asks for the policy's turns, in place of an environment that answers them.

    `asking`: it is the policy's turn. `over`: the program is not there any more.
    """

    asking: bool = False
    over: bool = False
    failed: bool = False


def environment_class(settings: CustomCode) -> Callable[[], ConversationEnvironment]:
    """The environment class that the settings name. Raises ConfigError, also if it cannot be called as it will be."""
    assert settings.path is not None
    environment = load_custom("rollout.environment", settings.path, settings.name or "Environment")
    check_parameters("rollout.environment", environment)
    for method, arguments in (("reset", ("self", "prompt", "seed")), ("step", ("self", "turn"))):
        check_method("rollout.environment", environment, method)
        if inspect.isfunction(function := inspect.getattr_static(environment, method, None)):
            check_parameters("rollout.environment", function, positional=arguments)
    return environment


class MessageTokens:
    """Renders what comes between two turns of the policy, whatever was said before.

    The text that follows a turn of the policy in a rendered conversation: tokens that were sampled stay as they are,
    and are never rendered and tokenised again. A template may drop parts of earlier turns once later ones follow, like
    Qwen3's thoughts; here they stay.
    """

    _FIRST, _TURN = "turn-of-the-user", "turn-of-the-policy"
    _START = ({"role": "user", "content": _FIRST}, {"role": "assistant", "content": _TURN})

    def __init__(self, tokenizer: Any, settings: DataConfig) -> None:
        self._tokenizer = tokenizer
        self._settings = settings
        self._first_special = re.compile(rf"\s*({special_tokens(tokenizer)})")
        self._opening = self._parts(self._START, opening=False)[0].partition(self._FIRST)[0]

    def __call__(self, messages: Sequence[Message], last_token: int) -> list[int]:
        """The tokens after the policy's turn, whose last token is `last_token`: with the template's end of a turn, if
        that is another one.

        Raises DataError where the chat template cannot say this.
        """
        before, turn, after = self._parts([*self._START, *messages], opening=True)
        if not turn or before.partition(self._FIRST)[0] != self._opening:
            raise DataError(
                "the model's chat template writes earlier turns differently once later ones follow",
                hint="set data.chat_template to a template that only appends, or let the environment give token_ids",
            )
        end = self._first_special.match(after)
        if end is not None and self._tokenizer.convert_tokens_to_ids(end[1]) == last_token:
            after = after[end.end() :]
        return list(self._tokenizer(after, add_special_tokens=False)["input_ids"])

    def _parts(self, messages: Sequence[Message], opening: bool) -> tuple[str, str, str]:
        """The rendered conversation before, in and after the policy's turn; the latter are empty if it is not there."""
        text = conversation_text(messages, self._tokenizer, self._settings, opening=opening)
        return text.partition(self._TURN)
