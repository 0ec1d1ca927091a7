"""A program's requests as one trajectory: the policy's tokens stay as they were sampled."""

from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError

from trainer.config.tree import Config
from trainer.data.formats.chat_template import conversation_text
from trainer.errors import DataError
from trainer.experience.call_format import CallFormat
from trainer.experience.environment import MessageTokens
from trainer.experience.programs.wire import BadRequestError, ChatReply, ChatRequest, for_template
from trainer.experience.trajectory import Trajectory

Message = dict[str, Any]


class ProgramConversation:
    """Extends a trajectory by requests and turns.

    The first request is the prompt. Each later one repeats it with all turns since, and adds messages: only these are
    rendered, after the tokens that are there.
    """

    def __init__(self, config: Config, tokenizer: Any, tokens: MessageTokens, call_format: CallFormat):
        self._config = config
        self._tokenizer = tokenizer
        self._tokens = tokens
        self._format = call_format
        self._said: list[Message] = []
        self._tools: list[Any] = []
        self._may_call = True
        self._limit = 0

    def begin_turn(self, row: Trajectory, request: ChatRequest) -> None:
        """Appends what the request adds. Raises BadRequestError if it cannot be appended."""
        if not self._said:
            row.prompt = self._prompt(request)
            self._tools = request.tools
        else:
            if row.turns == self._config.rollout.max_turns:
                raise BadRequestError(f"the policy has had its {row.turns} turns (rollout.max_turns)", "no_more_turns")
            row.observe(self._rendered(self._added(request), row.turn[-1]))
            if row.done:
                raise BadRequestError(
                    f"the conversation has no room for a turn (data.max_response_length={row.limit})",
                    "context_length_exceeded",
                )
        self._said = list(request.messages)
        self._may_call = request.may_call
        room = row.limit - len(row.token_ids)
        self._limit = len(row.token_ids) + min(room, request.max_tokens or room)

    def room(self, row: Trajectory) -> int:
        """Tokens left of the turn."""
        return self._limit - len(row.token_ids)

    def end_turn(self, row: Trajectory, ended: bool) -> ChatReply:
        """The turn that is complete; `ended`: by the policy itself."""
        if not ended and len(row.token_ids) < row.limit:
            row.turns += 1  # cut by the request's own limit
        written = str(self._tokenizer.decode(row.turn))
        calls = self._format.parse(written) if self._tools and self._may_call else []
        text = str(self._tokenizer.decode(row.turn, skip_special_tokens=True))
        content = text.partition(self._format.opening)[0].strip() if calls else text
        reason = "tool_calls" if calls else "stop" if ended else "length"
        before = len(row.prompt) + row.turn_start
        reply = ChatReply(content or (None if calls else ""), calls, reason, before, len(row.turn))
        self._said.append(for_template(reply.message()))
        return reply

    def _prompt(self, request: ChatRequest) -> tuple[int, ...]:
        try:
            text = conversation_text(request.messages, self._tokenizer, self._config.data, request.tools)
        except (TemplateError, ValueError) as error:
            raise BadRequestError(f"the model's chat template rejects the messages: {error}") from error
        token_ids = tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        limit = self._config.data.max_prompt_length
        if len(token_ids) > limit:
            raise BadRequestError(
                f"the prompt has {len(token_ids)} tokens, data.max_prompt_length is {limit}", "context_length_exceeded"
            )
        return token_ids

    def _added(self, request: ChatRequest) -> Sequence[Message]:
        """The messages after the policy's last turn. Raises BadRequestError if those before it are others."""
        if request.tools != self._tools:
            raise BadRequestError("the tools differ from those of the first request")
        for number, (sent, known) in enumerate(zip(request.messages, self._said, strict=False)):
            if not _same(sent, known):
                raise BadRequestError(f"message {number} differs from the conversation so far: it must only grow")
        if len(request.messages) <= len(self._said):
            raise BadRequestError("the request does not continue the conversation: it must only grow")
        return request.messages[len(self._said) :]

    def _rendered(self, messages: Sequence[Message], last_token: int) -> list[int]:
        try:
            return self._tokens(messages, last_token)
        except (TemplateError, ValueError, DataError) as error:
            raise BadRequestError(f"the model's chat template rejects the messages: {error}") from error


def _same(sent: Message, known: Message) -> bool:
    """Whether two messages say the same. Programs may leave out empty content and the ids of calls."""
    contents = [(message.get("content") or "").strip() for message in (sent, known)]
    return sent["role"] == known["role"] and contents[0] == contents[1] and _calls(sent) == _calls(known)


def _calls(message: Message) -> list[tuple[Any, Any]]:
    functions = [call["function"] for call in message.get("tool_calls") or []]
    return [(function["name"], function["arguments"]) for function in functions]
