"""The messages of a prompt, checked and reduced to text."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trainer.data.formats.tools import without_nulls
from trainer.errors import DataError

Messages = list[dict[str, Any]]

MEDIA = ("images", "videos")  # columns of datasets with vision
_NO_VISION = "vision is not supported: use a model and data of text, or remove such rows"


def text_messages(where: str, column: str, value: Any, hint: str, role: str | None = None) -> Messages:
    """The messages with plain text as content; text parts are joined, and nulls that Parquet adds are left out. With a
    `role`, a text is one message of it.

    A message with `tool_calls` may have null as content, or none. Raises DataError, which begins with `where`, for
    anything but a list of messages with role and content, for content that is null or not text, and for
    images, videos and audio.
    """
    if isinstance(value, str) and role is not None:
        if value.lstrip().startswith("[{") and '"role"' in value:
            raise DataError(f"{where}: column {column} holds messages as JSON in a text", hint="write the list itself")
        return [{"role": role, "content": checked_text(f"{where}: {column}", value, hint)}]
    if not isinstance(value, list) or not all(map(_is_message, value)):
        kinds = "not a list of messages" if role is None else "neither text nor a list of messages"
        raise DataError(f"{where}: column {column} is {kinds} with role and content", hint=hint)
    return [
        {
            name: _readable(f"{where}: message {number} of {column}", name, part, message)
            for name, part in {"content": None, **message}.items()
            if part is not None or name in ("role", "content")
        }
        for number, message in enumerate(value)
    ]


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and "role" in value and ("content" in value or bool(value.get("tool_calls")))


def refuse_media(where: str, row: Mapping[str, Any]) -> None:
    """Raises DataError if the row has images or videos: its text would lose them."""
    for column in MEDIA:
        if row[column]:
            raise DataError(f"{where}: column {column} is not empty", hint=_NO_VISION)


def checked_text(where: str, value: Any, hint: str) -> str:
    """The text. Raises DataError if it is something else, like bytes, or cannot be encoded."""
    if not isinstance(value, str):
        raise DataError(f"{where} is {type(value).__name__} instead of text", hint=hint)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where} is not valid Unicode: {error.reason}", hint="remove the lone surrogate") from error
    return value


def _readable(where: str, name: str, value: Any, message: Mapping[str, Any]) -> Any:
    if name == "role":
        return checked_text(f"{where}: the role", value, "roles are system, user, assistant or tool")
    if name != "content":
        return without_nulls(value)
    if value is None and message.get("tool_calls"):
        return None
    if isinstance(value, list):
        return "".join(_text_parts(where, value))
    if value is None:
        raise DataError(f"{where}: the content is null", hint="give every message a text, or remove the row")
    return checked_text(f"{where}: the content", value, "write the content as text")


def _text_parts(where: str, parts: Sequence[Any]) -> Iterator[str]:
    for number, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("image", "image_url", "video", "video_url", "audio", "input_audio"):
            raise DataError(f"{where}: part {number} is of type {kind}", hint=_NO_VISION)
        text = part.get("text") if isinstance(part, dict) and kind in ("text", None) else part
        yield checked_text(f"{where}: part {number}", text, "write parts as {type: text, text: …}")
