"""The endpoint on this machine's loopback: one address and one key for each trajectory."""

import asyncio
import json
import logging
import secrets
import socket
import threading
from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from trainer.errors import WorkerError
from trainer.experience.programs.wire import (
    BadRequestError,
    ChatReply,
    ChatRequest,
    read_request,
    write_error,
    write_reply,
    write_stream,
)

MODEL = "policy"
LONGEST_BODY = 16 * 2**20  # bytes
KEY_SECONDS = 20.0  # after which a connection that has shown no key is closed
MOST_STRANGERS = 64  # connections that have shown no key, beside one of each program
MOST_CONNECTIONS = 16  # of a program
_BODY_SECONDS = 60.0
_IDLE_SECONDS = 3600.0  # of a program's connection, which may work that long between its turns
_ANSWER_SECONDS = 1.0  # to send the last answer of a trajectory
_START_SECONDS, _CLOSE_SECONDS = 30.0, 5.0

logger = logging.getLogger(__name__)
logger.addFilter(lambda record: not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError)))


@dataclass(eq=False)
class Line:
    """One program's line to the policy: the endpoint's thread asks, the thread that samples answers.

    `changed` is set whenever there is something new to do for the latter.
    """

    changed: threading.Event
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    url: str = ""
    refusal: str = ""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _pending: "tuple[ChatRequest, Future[ChatReply]] | None" = None
    _answered: "tuple[ChatRequest, Future[ChatReply]] | None" = None
    _taken: bool = False
    _closed: bool = False

    def ask(self, request: ChatRequest, again: bool = False) -> "Future[ChatReply]":
        """The policy's turn, which may fail with BadRequestError. `again`: the client has sent this before and lost the
        answer.

        Raises BadRequestError.
        """
        with self._lock:
            if self._closed:
                raise BadRequestError("the trajectory has ended", "trajectory_ended", HTTPStatus.GONE)
            if again and self._answered is not None and request.same_turn(self._answered[0]):
                return self._answered[1]
            if self._pending is None:
                self._pending, self._taken = (request, Future()), False
                self.changed.set()
            elif not (again and request.same_turn(self._pending[0])):
                raise BadRequestError("another request of this trajectory is still under way: ask one at a time")
            return self._pending[1]

    def take(self) -> ChatRequest | None:
        """A request that is new; None without."""
        with self._lock:
            if self._pending is None or self._taken:
                return None
            self._taken = True
            return self._pending[0]

    def answer(self, reply: ChatReply | BadRequestError) -> None:
        """Answers the request that was taken."""
        with self._lock:
            assert self._pending is not None
            answered, self._pending = self._pending, None
            if isinstance(reply, ChatReply):
                self._answered = answered
        if isinstance(reply, ChatReply):
            answered[1].set_result(reply)
        else:
            self.refusal = str(reply)
            answered[1].set_exception(reply)

    def close(self) -> None:
        """Refuses the request under way, and all later ones."""
        with self._lock:
            self._closed, pending, self._pending = True, self._pending, None
        if pending is not None:
            pending[1].set_exception(BadRequestError("the trajectory has ended", "trajectory_ended", HTTPStatus.GONE))


class Endpoint:
    """Serves `URL/chat/completions` and `URL/models` to the lines that are open, `programs` at once.

    Raises WorkerError if it does not start.
    """

    def __init__(self, programs: int) -> None:
        self._lines: dict[str, Line] = {}
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._started = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(MOST_STRANGERS + programs)), name="endpoint", daemon=True
        )
        self._thread.start()
        if not self._started.wait(_START_SECONDS):
            raise WorkerError(f"the endpoint for programs did not start within {_START_SECONDS:g} s")

    def open(self, changed: threading.Event) -> Line:
        """A new line, with its own address and key."""
        line, name = Line(changed), secrets.token_hex(8)
        line.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}/{name}/v1"
        self._lines[name] = line
        return line

    def drop(self, line: Line) -> None:
        """Closes a line and its connections, and forgets its address."""
        line.close()
        self._lines.pop(line.url.split("/")[-2], None)
        self._loop.call_soon_threadsafe(self._loop.call_later, _ANSWER_SECONDS, self._server.disconnect, line)

    def close(self) -> None:
        """Ends the server."""
        for line in list(self._lines.values()):
            self.drop(line)
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(_CLOSE_SECONDS)

    async def _serve(self, most_strangers: int) -> None:
        self._loop, self._closing = asyncio.get_running_loop(), asyncio.Event()
        self._server = _Server(self._answered, most_strangers)
        listener = await self._loop.create_server(self._server, sock=self._listening, backlog=1024)
        self._started.set()
        await self._closing.wait()
        listener.close()
        self._server.pre_shutdown()
        await self._server.shutdown(_ANSWER_SECONDS)

    async def _answered(self, request: web.BaseRequest) -> web.Response:
        try:
            return await self._answer(request)
        except BadRequestError as error:
            refused = _response(error.status, write_error(error))
            if error.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.NOT_FOUND, HTTPStatus.REQUEST_ENTITY_TOO_LARGE):
                refused.force_close()  # instead of reading the rest of the body
            return refused

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        """Raises BadRequestError."""
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "trainer"}
        models: dict[str, dict[str, Any]] = {"models": {"object": "list", "data": [model]}, f"models/{MODEL}": model}
        if request.method == "GET":
            _, path = self._admitted(request, models)
            return _response(HTTPStatus.OK, models[path])
        line, _ = self._admitted(request, ["chat/completions"] if request.method == "POST" else [])
        asked = read_request(await _body(request))
        again = request.headers.get("x-stainless-retry-count", "0") != "0"
        reply = await asyncio.shield(asyncio.wrap_future(line.ask(asked, again)))
        name = asked.model or MODEL
        if asked.stream:
            return _response(HTTPStatus.OK, write_stream(reply, name), "text/event-stream")
        return _response(HTTPStatus.OK, write_reply(reply, name))

    def _admitted(self, request: web.BaseRequest, known: Collection[str]) -> tuple[Line, str]:
        """The line of the address, and which of the known paths. Raises BadRequestError if it, the path or the key is
        wrong."""
        name, _, path = request.path.strip("/").partition("/v1/")
        line = self._lines.get(name)
        if line is None or path not in known:
            raise BadRequestError(f"nothing is at {request.path}", "not_found", HTTPStatus.NOT_FOUND)
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not secrets.compare_digest(given.encode(errors="replace"), line.token.encode()):
            raise BadRequestError("the key is wrong", "invalid_api_key", HTTPStatus.UNAUTHORIZED)
        self._server.recognise(request.protocol, line)
        return line, path


class _Server(web.Server):  # type: ignore[misc]
    """An HTTP server whose connections belong to a line, or are few and end soon."""

    def __init__(self, handler: Any, most_strangers: int) -> None:
        self._loop = asyncio.get_running_loop()
        super().__init__(
            handler,
            request_factory=lambda *parts: web.BaseRequest(*parts, self._loop, client_max_size=LONGEST_BODY),
            handler_cancellation=True,
            keepalive_timeout=_IDLE_SECONDS,
            auto_decompress=False,
            access_log=None,
            logger=logger,
        )
        self._most_strangers = most_strangers
        self._strangers: dict[web.RequestHandler, asyncio.TimerHandle] = {}
        self._known: dict[web.RequestHandler, Line] = {}

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        self._strangers[handler] = self._loop.call_later(KEY_SECONDS, handler.force_close)
        if len(self._strangers) > self._most_strangers:
            oldest = next(iter(self._strangers))
            self._strangers.pop(oldest).cancel()
            oldest.force_close()

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        self._known.pop(handler, None)
        if timer := self._strangers.pop(handler, None):
            timer.cancel()

    def recognise(self, handler: web.RequestHandler, line: Line) -> None:
        """Keeps a connection that has shown the key of a line."""
        if timer := self._strangers.pop(handler, None):
            timer.cancel()
            self._known[handler] = line
            connections = [other for other, owner in self._known.items() if owner is line]
            if len(connections) > MOST_CONNECTIONS:
                connections[0].force_close()

    def disconnect(self, line: Line) -> None:
        for handler in [handler for handler, owner in self._known.items() if owner is line]:
            handler.force_close()


async def _body(request: web.BaseRequest) -> bytes:
    """Raises BadRequestError if it is too long, too slow or incomplete."""
    if request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # as aiohttp's own handler of this header does
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            return bytes(await request.read())
    except web.HTTPRequestEntityTooLarge as error:
        problem = f"the body has more than {LONGEST_BODY} bytes"
        raise BadRequestError(problem, "request_too_large", HTTPStatus.REQUEST_ENTITY_TOO_LARGE) from error
    except (TimeoutError, web.RequestPayloadError) as error:
        raise BadRequestError(f"the body is incomplete: {error}") from error


def _response(status: int, body: dict[str, Any] | bytes, kind: str = "application/json") -> web.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return web.Response(body=content, status=status, content_type=kind)
