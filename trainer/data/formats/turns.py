"""The assistant's turns in a conversation as a chat template writes it: which text is learned.

A template may mark them with `{% generation %}`. Of any other template a turn begins after the opening with which the
model is asked for it, and ends with the last text that the template writes before the next message.
"""

import logging
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile
from typing import Any

from jinja2 import TemplateError

from trainer.config.sections.data import DataConfig
from trainer.data.formats.chat_template import checked_conversation_text, conversation_text, marked_spans
from trainer.data.formats.messages import Messages
from trainer.errors import DataError

logger = logging.getLogger(__name__)

_TAG = r"<[^<>\s]+>|\[[^\[\]\s]+\]"  # looks like a special token, and may be text to the tokenizer
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
_ANSWER, _NEXT = "ANSWER-between-its-surroundings", "NEXT-message"  # in place of messages' contents

Span = tuple[int, int]


@dataclass(frozen=True)
class Part:
    """A text of a conversation, and whether it is learned."""

    text: str
    learned: bool


def special_tokens(tokenizer: Any) -> str:
    """A regular expression for the texts of the tokenizer's special and added tokens, without blank ones."""
    texts = {text for text in (*tokenizer.get_added_vocab(), *tokenizer.all_special_tokens) if text.strip(" \t\n▁")}
    return "|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)"


class TurnFinder:
    """Finds the learned parts of conversations."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._warned = False
        special = special_tokens(tokenizer)
        self.first_special = re.compile(rf"\s*(?:{special})")
        self.last_special = re.compile(rf"(?:{special})\s*\Z")
        self.atoms = re.compile(f"{special}|{_TAG}")

    def parts(
        self, where: str, messages: Messages, first: int, settings: DataConfig, tools: Sequence[Any]
    ) -> list[Part]:
        """The conversation up to its last message of the assistant. Its messages of the assistant from number `first`
        on are learned, with the end of each turn.

        If the template writes no end of a turn, like GLM's, the special token that opens the next message ends it.
        Raises DataError, which begins with `where`, if the template rejects the messages, writes earlier ones
        differently once others follow, or leaves out part of a message that is to be learned.
        """
        numbers = [n for n, message in enumerate(messages) if n >= first and message["role"] == "assistant"]
        if not numbers:
            raise DataError(f"{where}: no message of the assistant to learn", hint="remove such rows")
        conversation = _Conversation(self, where, messages[: numbers[-1] + 1], settings, tools)
        spans = conversation.marked(numbers[0] if first else None)
        if spans is None:
            spans = [(conversation.start(number), conversation.end(number)) for number in numbers]
            learned = [conversation.whole[start:end] for start, end in spans]
        else:
            learned = ["".join(conversation.whole[start:end] for start, end in spans)] * len(numbers)
            if not self.last_special.search(learned[-1]):
                self.warn_of_endless_turns()
        for number, text in zip(numbers, learned, strict=True):
            _check_written(f"{where}: message {number}", messages[number], text)
        return _parts(conversation.whole, spans)

    def warn_of_endless_turns(self) -> None:
        """Says once that the learned turns have no end."""
        if not self._warned:
            self._warned = True
            logger.warning("the chat template ends turns with no special token: the model learns no end of its answers")


class _Conversation:
    """A conversation that ends with a message of the assistant; `whole` is its text."""

    def __init__(
        self, finder: TurnFinder, where: str, messages: Messages, settings: DataConfig, tools: Sequence[Any]
    ) -> None:
        self._finder, self._where, self._messages = finder, where, messages
        self._settings, self._tools = settings, tools
        self.whole = self._text(messages)

    def marked(self, first: int | None) -> list[Span] | None:
        """What the template marks: all, or from the turn of message `first` on; None if the template has no marks."""
        spans = marked_spans(self._messages, self._finder.tokenizer, self._settings, self._tools)
        if spans is None:
            return None
        begin = 0 if first is None else self.start(first)
        return [(max(start, begin), end) for start, end in spans if end > max(start, begin)]

    def start(self, number: int) -> int:
        """Where the turn of a message begins."""
        before = self._messages[:number]
        opened = self._text(before, opening=True)
        if self.whole.startswith(opened):
            return len(opened)
        # The opening may hold the start of a thought that the template does not write into this turn.
        shared = self._common(opened, self._text(self._with_answer(number)))
        if len(shared) <= len(self._common(opened, self._text(before))) or not self.whole.startswith(shared):
            raise self._rewritten(number)
        return len(shared)

    def end(self, number: int) -> int:
        """Where the turn of a message ends. `whole` gets the end of the last turn if the template writes none."""
        last = number == len(self._messages) - 1
        end, closed = (len(self.whole), True) if last else self._end_before_others(number)
        answered = [*self._messages[:number], {"role": "assistant", "content": _ANSWER}]
        if closed and self._text(answered).partition(_ANSWER)[2].strip():
            return end
        opening = self._next_opening(number) if last else self.whole[end:]
        ending = self._finder.first_special.match(opening)
        if ending is None:
            self._finder.warn_of_endless_turns()
            return end
        self.whole += ending[0] if last else ""
        return end + ending.end()

    def _end_before_others(self, number: int) -> tuple[int, bool]:
        """Where the turn ends before further messages: after the text that the template writes without them, too.

        False if the template ends the whole with a token in place of the end of this turn.
        """
        for conversation in (self._messages, self._with_answer(number)):
            after, alone = (self._after_answer(text, number) for text in (conversation, conversation[: number + 1]))
            shared = self._common(after, alone)
            others, ending = after[len(shared) :], alone[len(shared) :]
            end = len(self.whole) - len(others)
            if (
                not self._finder.atoms.sub("", ending).strip()
                and self.whole.endswith(others)
                and end > self.start(number)
            ):
                return end, not ending.strip() or bool(self._finder.last_special.search(self.whole[:end]))
        raise self._rewritten(number)

    def _after_answer(self, messages: Messages, number: int) -> str:
        """The text after `_ANSWER`, or the whole turn of a message where that is not written."""
        before, answer, after = self._text(messages).partition(_ANSWER)
        return after if answer else before[self.start(number) :]

    def _next_opening(self, number: int) -> str:
        """What the template would write between the turn of the last message and the content of another."""
        message = {name: part for name, part in self._messages[number].items() if name not in _THOUGHTS}
        answered = [*self._messages[:number], message | {"content": _ANSWER}]
        following = [*answered, {"role": "tool" if message.get("tool_calls") else "user", "content": _NEXT}]
        try:
            texts = [
                conversation_text(messages, self._finder.tokenizer, self._settings, self._tools, opening=False)
                for messages in (answered, following)
            ]
        except (TemplateError, ValueError):  # it may want other roles
            return ""
        return texts[1].removeprefix(texts[0]).partition(_NEXT)[0] if texts[1].startswith(texts[0]) else ""

    def _with_answer(self, number: int) -> Messages:
        return [{**message, "content": _ANSWER} if n == number else message for n, message in enumerate(self._messages)]

    def _text(self, messages: Messages, opening: bool = False) -> str:
        return checked_conversation_text(
            self._where, messages, self._finder.tokenizer, self._settings, self._tools, opening
        )

    def _common(self, text: str, other: str) -> str:
        """The common prefix of both texts, cut before a part of a special token."""
        end = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(text, other, strict=False)))
        cut = [
            atom.start()
            for rendering in (text, other)
            for atom in self._finder.atoms.finditer(rendering)
            if _spans(atom, end)
        ]
        return text[: min(cut, default=end)]

    def _rewritten(self, number: int) -> DataError:
        return DataError(
            f"{self._where}: message {number}: the chat template writes it, or messages before it, differently as the "
            "conversation goes on",
            hint="set data.chat_template to one that only appends, or that marks the assistant's turns with "
            "{% generation %}",
        )


def _spans(atom: re.Match[str], position: int) -> bool:
    return atom.start() < position < atom.end()


def _check_written(where: str, message: dict[str, Any], text: str) -> None:
    """Raises DataError if the text lacks a part of the content, the thoughts or the calls of a message."""
    content, calls = re.split(r"</?think>", message.get("content") or ""), message.get("tool_calls")
    functions = (
        [call.get("function", call) for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    )
    names = [function.get("name") for function in functions if isinstance(function, dict)]
    parts: dict[str, list[Any]] = {"content": [*content], "tool_calls": names}
    parts |= {name: [message.get(name)] for name in _THOUGHTS}
    for name, texts in parts.items():
        if any(isinstance(part, str) and part.strip() not in text for part in texts):
            raise DataError(
                f"{where}: the chat template leaves out its {name}, or a part of it",
                hint="set data.chat_template to one that writes it, give each turn as a row of its own, or remove it",
            )


def _parts(whole: str, spans: Sequence[Span]) -> list[Part]:
    """The text up to the end of the last span; the spans are learned."""
    parts, position = [], 0
    for start, end in spans:
        parts += [Part(whole[position:start], False), Part(whole[start:end], True)]
        position = end
    return [part for part in parts if part.text]


def encode(parts: Sequence[Part], tokenizer: Any) -> tuple[list[int], list[bool]]:
    """The tokens of the parts, and which of them are learned.

    The text is tokenised as a whole, because some tokenizers begin each text with a blank. Where a token would belong
    to two parts, they are tokenised apart: the model is asked for a turn after the tokens of what comes before it.
    """
    text = "".join(part.text for part in parts)
    if len(parts) == 1:
        tokens = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        return tokens, [parts[0].learned] * len(tokens)
    apart: int | None = 1
    if tokenizer.is_fast:
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        borders = list(accumulate(len(part.text) for part in parts[:-1]))
        ends = {end for _, end in encoded["offset_mapping"]}
        apart = next((number for number, border in enumerate(borders, start=1) if border not in ends), None)
        if apart is None:
            learned = [parts[bisect_right(borders, start)].learned for start, _ in encoded["offset_mapping"]]
            return list(encoded["input_ids"]), learned
    (head, head_learned), (tail, tail_learned) = encode(parts[:apart], tokenizer), encode(parts[apart:], tokenizer)
    return head + tail, head_learned + tail_learned
