"""The endpoint on this machine's loopback: one address and one key for each trajectory."""

import json
import secrets
import threading
from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

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
_LONGEST_BODY = 64 * 2**20


@dataclass
class Line:
    """One program's line to the policy: threads of the server ask, the thread that samples answers.

    `changed` is set whenever there is something new to do for the latter.
    """

    changed: threading.Event
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    url: str = ""
    refusal: str = ""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _pending: "tuple[ChatRequest, Future[ChatReply]] | None" = None
    _answered: tuple[ChatRequest, ChatReply] | None = None
    _taken: bool = False
    _closed: bool = False

    def ask(self, request: ChatRequest, again: bool = False) -> ChatReply:
        """The policy's turn; waits for it. `again`: the client has sent this before and lost the answer.

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
            future = self._pending[1]
        return future.result()

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
            (request, future), self._pending = self._pending, None
            if isinstance(reply, ChatReply):
                self._answered = (request, reply)
        if isinstance(reply, ChatReply):
            future.set_result(reply)
        else:
            self.refusal = str(reply)
            future.set_exception(reply)

    def close(self) -> None:
        """Refuses the request under way, and all later ones."""
        with self._lock:
            self._closed, pending, self._pending = True, self._pending, None
        if pending is not None:
            pending[1].set_exception(BadRequestError("the trajectory has ended", "trajectory_ended", HTTPStatus.GONE))


class Endpoint:
    """Serves `URL/chat/completions` and `URL/models` to the lines that are open."""

    def __init__(self) -> None:
        self._lines: dict[str, Line] = {}
        self._server = _Server(("127.0.0.1", 0), partial(_Handler, self._lines))
        threading.Thread(target=self._server.serve_forever, name="endpoint", daemon=True).start()

    def open(self, changed: threading.Event) -> Line:
        """A new line, with its own address and key."""
        line, name = Line(changed), secrets.token_hex(8)
        line.url = f"http://127.0.0.1:{self._server.server_port}/{name}/v1"
        self._lines[name] = line
        return line

    def drop(self, line: Line) -> None:
        """Closes a line and forgets its address."""
        line.close()
        self._lines.pop(line.url.split("/")[-2], None)

    def close(self) -> None:
        """Ends the server."""
        for line in list(self._lines.values()):
            self.drop(line)
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    request_queue_size = 1024
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing: a program that ends leaves its connections."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 3600  # seconds of an idle connection

    def __init__(self, lines: dict[str, Line], *arguments: Any) -> None:
        self._lines = lines
        super().__init__(*arguments)

    def do_GET(self) -> None:
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "trainer"}
        found: dict[str, dict[str, Any]] = {"models": {"object": "list", "data": [model]}, f"models/{MODEL}": model}
        try:
            _, path = self._line(found)
        except BadRequestError as error:
            return self._send(error.status, write_error(error))
        return self._send(HTTPStatus.OK, found[path])

    def do_POST(self) -> None:
        body = self.rfile.read(min(int(self.headers.get("Content-Length") or 0), _LONGEST_BODY))
        try:
            line = self._line(["chat/completions"])[0]
            request = read_request(body)
            reply = line.ask(request, again=self.headers.get("x-stainless-retry-count", "0") != "0")
        except BadRequestError as error:
            return self._send(error.status, write_error(error))
        model = request.model or MODEL
        if request.stream:
            return self._send(HTTPStatus.OK, write_stream(reply, model), "text/event-stream")
        return self._send(HTTPStatus.OK, write_reply(reply, model))

    def _line(self, known: Collection[str]) -> tuple[Line, str]:
        """The line of the address, and which of the known paths. Raises BadRequestError if it, the path or the key is
        wrong."""
        name, _, path = self.path.partition("?")[0].strip("/").partition("/v1/")
        line = self._lines.get(name)
        if line is None or path not in known:
            raise BadRequestError(f"nothing is at {self.path}", "not_found", HTTPStatus.NOT_FOUND)
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if not secrets.compare_digest(given.encode(), line.token.encode()):
            raise BadRequestError("the key is wrong", "invalid_api_key", HTTPStatus.UNAUTHORIZED)
        return line, path

    def _send(self, status: int, body: dict[str, Any] | bytes, kind: str = "application/json") -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Requests are not logged."""
