"""The channel between pool and reward process: lines of JSON over a private socket."""

import base64
import datetime
import json
import math
import select
import socket
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any

from trainer.errors import DataError

LONGEST = 2**28  # bytes of a line
SEND_SECONDS = 30.0
_TAG = "\x00type"  # the key of an object that stands for a value without a form in JSON
_READERS: dict[str, Callable[[str], object]] = {
    "bytes": base64.b64decode,
    "Decimal": Decimal,
    "datetime": datetime.datetime.fromisoformat,
    "date": datetime.date.fromisoformat,
    "time": datetime.time.fromisoformat,
    "timedelta": lambda seconds: datetime.timedelta(seconds=float(seconds)),
}


class BrokenChannelError(Exception):
    """The other end failed to write a line of JSON: "died", "does not read", "wrote ..."."""


class Channel:
    """One end of the socket. Other processes that a reward function starts do not inherit it."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._end.set_inheritable(False)
        self._end.settimeout(SEND_SECONDS)
        self._read = bytearray()

    def fileno(self) -> int:
        return self._end.fileno()

    def close(self) -> None:
        self._end.close()

    def send(self, value: object) -> None:
        """Raises BrokenChannelError if the other end is gone, DataError for a value that JSON cannot hold."""
        line = json.dumps(value, default=_tagged).encode() + b"\n"
        try:
            self._end.sendall(line)
        except OSError as error:
            raise BrokenChannelError(f"does not read: {error}") from error

    def receive(self) -> Any:
        """The next value, waited for. Raises BrokenChannelError."""
        while True:
            value = self.poll()
            if value is not None:
                return value
            readable([self], None)

    def poll(self) -> Any:
        """The next value, or None if it has not arrived as a whole. Raises BrokenChannelError."""
        while b"\n" not in self._read:
            if not readable([self], 0.0):
                return None
            try:
                part = self._end.recv(2**20)
            except OSError as error:
                raise BrokenChannelError("died") from error
            if not part or len(self._read) > LONGEST:
                raise BrokenChannelError("wrote a line without an end" if part else "died")
            self._read += part
        line, _, self._read = self._read.partition(b"\n")
        try:
            value = json.loads(line, object_hook=_untagged)
        except (ValueError, ArithmeticError, RecursionError) as error:
            raise BrokenChannelError(f"wrote {bytes(line[:80])!r}") from error
        if value is None:
            raise BrokenChannelError("wrote b'null'")
        return value


def readable(channels: Sequence[Channel], seconds: float | None) -> list[Channel]:
    """The channels with something to read; waits at most this long for one."""
    by_descriptor = {channel.fileno(): channel for channel in channels}
    poll = select.poll()
    for number in by_descriptor:
        poll.register(number, select.POLLIN)
    return [by_descriptor[number] for number, _ in poll.poll(None if seconds is None else math.ceil(1000 * seconds))]


def _tagged(value: object) -> dict[str, str]:
    if isinstance(value, bytes):
        return {_TAG: "bytes", "value": base64.b64encode(value).decode()}
    if isinstance(value, datetime.timedelta):
        return {_TAG: "timedelta", "value": repr(value.total_seconds())}
    if isinstance(value, datetime.date | datetime.time):
        return {_TAG: type(value).__name__, "value": value.isoformat()}
    if isinstance(value, Decimal):
        return {_TAG: "Decimal", "value": str(value)}
    raise DataError(
        f"a reward process cannot be sent a {type(value).__name__}: {value!r:.200}",
        hint="keep text, numbers, lists and mappings in reward_model.ground_truth and extra_info",
    )


def _untagged(value: Mapping[str, Any]) -> Any:
    reader = _READERS.get(value.get(_TAG, ""))
    return value if reader is None else reader(value["value"])
