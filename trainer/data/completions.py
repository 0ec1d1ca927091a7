"""Training rows of SFT, DPO and KTO: prompts with their responses, and whole conversations."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.config.sections.data import DataConfig
from trainer.data.formats.chat_template import with_system_prompt
from trainer.data.formats.files import value_at
from trainer.data.formats.messages import MEDIA, Messages, refuse_media, text_messages
from trainer.data.formats.tools import checked_tools, read_tools
from trainer.data.formats.turns import TurnFinder, encode
from trainer.errors import DataError

OPTIONAL = ("tools", "enable_thinking", *MEDIA)  # columns that every row may have


@dataclass(frozen=True)
class Completion:
    """Tokens of a row up to the first that is learned, the tokens from there on, and which of those are learned.

    The last one is.
    """

    prompt: tuple[int, ...]
    response: tuple[int, ...]
    learned: tuple[bool, ...]


@dataclass(frozen=True)
class Tokens:
    """The tokens of a row, and which of them are learned."""

    token_ids: Sequence[int]
    learned: Sequence[bool]

    def completion(self, where: str, kept: slice = slice(None)) -> Completion:
        """The row, or a part of it. Raises DataError, which begins with `where`, if that has no token to learn."""
        token_ids, learned = self.token_ids[kept], self.learned[kept]
        if True not in learned[1:]:  # the first token has nothing before it that predicts it
            raise DataError(f"{where}: no token is left to learn", hint="raise sft.max_length, or remove such rows")
        first = max(1, learned.index(True))
        end = len(learned) - learned[::-1].index(True)
        return Completion(tuple(token_ids[:first]), tuple(token_ids[first:end]), tuple(learned[first:end]))


class CompletionReader:
    """Turns rows into tokens, with the model's chat template. `hint` says what a row has.

    A row's own columns `tools` and `enable_thinking` go to its chat template. Its methods raise DataError, which begins
    with `where`.
    """

    def __init__(self, tokenizer: Any, settings: DataConfig, hint: str) -> None:
        self._tokenizer, self._settings, self._hint = tokenizer, settings, hint
        self._tools = read_tools(settings)
        self._turns = TurnFinder(tokenizer)

    def response(self, where: str, row: Mapping[str, Any], key: str) -> Tokens:
        """The prompt of a row with the response under `key`: text, or messages, of which those of the assistant are
        learned. The messages may repeat the prompt."""
        prompt = self._messages(where, row, self._settings.prompt_key)
        response = self._messages(where, row, key, role="assistant")
        repeated = next((n for n in range(len(response), 0, -1) if response[:n] == prompt[-n:]), 0)
        response = response[repeated:]
        if not response or response[0]["role"] != "assistant":
            role = response[0]["role"] if response else "nobody"
            raise DataError(
                f"{where}: {key} begins with a message of {role} that {self._settings.prompt_key} does not end with",
                hint="the response begins with a message of the assistant, or repeats the prompt",
            )
        prompt = with_system_prompt(prompt, self._settings)
        return self._encoded(where, row, [*prompt, *response], len(prompt))

    def conversation(self, where: str, row: Mapping[str, Any], key: str) -> Tokens:
        """The conversation under `key`, of which every message of the assistant is learned."""
        messages = with_system_prompt(self._messages(where, row, key), self._settings)
        return self._encoded(where, row, messages, 0)

    def _messages(self, where: str, row: Mapping[str, Any], key: str, role: str = "user") -> Messages:
        value = value_at(where, row, key, self._hint)
        if not value:
            raise DataError(f"{where}: {key} is empty", hint=self._hint)
        return text_messages(where, key, value, self._hint, role)

    def _encoded(self, where: str, row: Mapping[str, Any], messages: Messages, first: int) -> Tokens:
        refuse_media(where, row)
        tools, settings = self._tools, self._settings
        if row["tools"]:
            tools = checked_tools(where, row["tools"])
        if row["enable_thinking"] is not None:
            kwargs = {**settings.chat_template_kwargs, "enable_thinking": bool(row["enable_thinking"])}
            settings = settings.model_copy(update={"chat_template_kwargs": kwargs})
        parts = self._turns.parts(where, messages, first, settings, tools)
        return Tokens(*encode(parts, self._tokenizer))
