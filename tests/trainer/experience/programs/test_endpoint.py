"""The endpoint of programs: what strangers and programs can do to it over real connections."""

import json
import logging
import re
import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from trainer.experience.programs import endpoint as module
from trainer.experience.programs.endpoint import LONGEST_BODY, MOST_CONNECTIONS, MOST_STRANGERS, Endpoint, Line
from trainer.experience.programs.wire import ChatReply, ChatRequest

PROGRAMS = 4
REPLY = ChatReply("19", [], "stop", 3, 2)
MESSAGES = [{"role": "user", "content": "What?"}]


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with closing(Endpoint(PROGRAMS)) as opened:
        yield opened


@pytest.fixture
def line(endpoint: Endpoint) -> Line:
    return endpoint.open(threading.Event())


@pytest.fixture
def policy(line: Line) -> Iterator[list[ChatRequest]]:
    """Answers each request of the line; the requests that it took."""
    taken: list[ChatRequest] = []
    ended = threading.Event()

    def answer() -> None:
        while not ended.is_set():
            line.changed.wait(0.1)
            line.changed.clear()
            if (request := line.take()) is not None:
                taken.append(request)
                line.answer(REPLY)

    thread = threading.Thread(target=answer)
    thread.start()
    yield taken
    ended.set()
    thread.join()


def connect(line: Line) -> socket.socket:
    port = int(re.findall(r":(\d+)/", line.url)[0])
    return socket.create_connection(("127.0.0.1", port), timeout=20)


def head(line: Line, *headers: str, key: str | None = None, path: str = "chat/completions") -> bytes:
    """The head of a POST with the line's own key unless another is given."""
    target = "/" + line.url.partition("//")[2].partition("/")[2]
    lines = [f"POST {target}/{path} HTTP/1.1", "Host: x", f"Authorization: Bearer {key or line.token}", *headers]
    return "\r\n".join([*lines, "", ""]).encode()


def request(line: Line, **more: Any) -> bytes:
    body = json.dumps({"messages": MESSAGES, **more}).encode()
    return head(line, f"Content-Length: {len(body)}") + body


def answer(connection: socket.socket) -> tuple[int, Any]:
    """Status and body of the next reply."""
    with connection.makefile("rb") as file:
        status = int(file.readline().split()[1])
        headers = dict(line.rstrip(b"\r\n").split(b": ", 1) for line in iter(file.readline, b"\r\n"))
        return status, json.loads(file.read(int(headers[b"Content-Length"])))


def closes(connection: socket.socket) -> bool:
    """Whether the other end closes it; waits for that."""
    try:
        while connection.recv(2**16):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


@pytest.mark.parametrize("length", [f"Content-Length: {2**30}", "Transfer-Encoding: chunked"])
@pytest.mark.parametrize(("key", "path", "status"), [("wrong", "chat/completions", 401), (None, "other", 404)])
def test_the_key_comes_before_the_body(line: Line, length: str, key: str | None, path: str, status: int) -> None:
    with connect(line) as stranger:
        stranger.sendall(head(line, length, key=key, path=path))
        assert answer(stranger)[0] == status


def test_a_body_without_the_key_is_not_kept(line: Line) -> None:
    body = bytes(256 * 2**20)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with connect(line) as stranger:
        stranger.sendall(head(line, f"Content-Length: {2**30}", key="wrong"))
        send_all(stranger, body)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 2**10


@pytest.mark.parametrize("length", ["-1", "+5", "5, 6", "0x10", "9" * 40, "five"])
def test_a_length_that_is_none_is_refused(line: Line, length: str, caplog: pytest.LogCaptureFixture) -> None:
    with connect(line) as program:
        program.sendall(head(line, f"Content-Length: {length}") + b"x" * 100)
        program.settimeout(20)
        with program.makefile("rb") as file:
            assert file.readline().split()[1] in (b"400", b"413")
        assert closes(program)
    assert not caplog.records


def test_a_body_is_bounded(line: Line) -> None:
    with connect(line) as program:
        program.sendall(head(line, f"Content-Length: {LONGEST_BODY + 1}"))
        sender = threading.Thread(target=lambda: send_all(program, bytes(LONGEST_BODY + 1)))
        sender.start()
        status, body = answer(program)
        assert (status, body["error"]["code"]) == (413, "request_too_large")
        program.close()
        sender.join()


def send_all(connection: socket.socket, data: bytes) -> None:
    with suppress(OSError):
        connection.sendall(data)


def test_a_long_body_is_read(line: Line, policy: list[ChatRequest]) -> None:
    text = "x" * 3 * 2**20
    with connect(line) as program:
        program.sendall(request(line, messages=[{"role": "user", "content": text}]))
        assert answer(program)[0] == 200
    assert policy[0].messages[0]["content"] == text


def test_a_client_may_ask_whether_to_send_its_body(line: Line, policy: list[ChatRequest]) -> None:
    body = json.dumps({"messages": MESSAGES}).encode()
    with connect(line) as program:
        program.sendall(head(line, f"Content-Length: {len(body)}", "Expect: 100-continue"))
        assert program.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        program.sendall(body)
        assert answer(program)[0] == 200
    assert len(policy) == 1


@pytest.mark.parametrize("headers", [["X: " + "y" * 10**6], [f"X{number}: y" for number in range(10**4)]])
def test_headers_are_bounded(line: Line, headers: list[str], caplog: pytest.LogCaptureFixture) -> None:
    with connect(line) as stranger:
        send_all(stranger, head(line, *headers))
        assert closes(stranger)
    assert not caplog.records


def test_silent_connections_are_few_and_need_no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEY_SECONDS", 600.0)
    most = MOST_STRANGERS + PROGRAMS
    with closing(Endpoint(PROGRAMS)) as endpoint, ExitStack() as opened:
        line = endpoint.open(threading.Event())
        threads = threading.active_count()
        silent = [opened.enter_context(connect(line)) for _ in range(5 * most)]
        assert all(map(closes, silent[: 4 * most]))
        assert threading.active_count() == threads
        program = opened.enter_context(connect(line))
        program.sendall(head(line, "Content-Length: 2") + b"{}")
        assert answer(program)[0] == 400


@pytest.mark.parametrize("sent", [b"", b"POST / HTTP/1.1\r\nX: y\r\n"])
def test_a_connection_without_a_key_ends(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(module, "KEY_SECONDS", 0.2)
    with closing(Endpoint(PROGRAMS)) as endpoint, connect(endpoint.open(threading.Event())) as stranger:
        stranger.sendall(sent)
        assert closes(stranger)


def test_a_program_keeps_its_connection_until_its_trajectory_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEY_SECONDS", 0.2)
    with closing(Endpoint(PROGRAMS)) as endpoint:
        line, other = endpoint.open(threading.Event()), endpoint.open(threading.Event())
        with connect(line) as program, connect(other) as neighbour:
            for connection, asked in ((program, line), (neighbour, other)):
                connection.sendall(head(asked, "Content-Length: 2") + b"{}")
                assert answer(connection)[0] == 400
            with connect(line) as stranger:
                assert closes(stranger)  # which is kept as long as these would be without their keys
            program.sendall(request(line))
            while line.take() is None:
                assert line.changed.wait(20)
            endpoint.drop(line)
            status, body = answer(program)
            assert (status, body["error"]["code"]) == (410, "trajectory_ended")
            assert closes(program)
            neighbour.sendall(head(other, "Content-Length: 2") + b"{}")
            assert answer(neighbour)[0] == 400


def test_connections_of_a_program_are_bounded(line: Line) -> None:
    with ExitStack() as opened:
        connections = []
        for _ in range(MOST_CONNECTIONS + 3):
            connections.append(opened.enter_context(connect(line)))
            connections[-1].sendall(head(line, "Content-Length: 2") + b"{}")
            assert answer(connections[-1])[0] == 400
        assert all(map(closes, connections[:3]))
        connections[3].sendall(head(line, "Content-Length: 2") + b"{}")
        assert answer(connections[3])[0] == 400


def test_an_answer_that_was_lost_is_given_again(line: Line) -> None:
    with connect(line) as program:
        program.sendall(request(line))
        while line.take() is None:
            assert line.changed.wait(20)
    line.answer(REPLY)
    with connect(line) as program:
        body = json.dumps({"messages": MESSAGES}).encode()
        program.sendall(head(line, f"Content-Length: {len(body)}", "x-stainless-retry-count: 1") + body)
        status, reply = answer(program)
    assert (status, reply["choices"][0]["message"]["content"]) == (200, "19")


@given(sent=st.binary(max_size=300) | st.lists(st.binary(max_size=40), max_size=20).map(b"\r\n".join))
@example(sent=b"GET / HTTP/1.1\r\n\r\n" * 1000)
@example(sent=b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
@example(sent=b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
def test_nothing_that_strangers_send_disturbs_programs(
    line: Line, policy: list[ChatRequest], caplog: pytest.LogCaptureFixture, sent: bytes
) -> None:
    with connect(line) as stranger, connect(line) as program:
        send_all(stranger, sent)
        program.sendall(request(line))
        assert answer(program)[0] == 200
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_openai_s_client(line: Line, policy: list[ChatRequest]) -> None:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=line.url, api_key=line.token, max_retries=0) as client:
        reply = client.chat.completions.create(model="policy", messages=MESSAGES)
        assert (reply.choices[0].message.content, reply.usage.total_tokens) == ("19", 5)
        stream = client.chat.completions.create(model="policy", messages=MESSAGES, stream=True)
        assert [part.choices[0].delta.content for part in stream] == ["19", None]
        assert [model.id for model in client.models.list()] == ["policy"]
        with pytest.raises(openai.BadRequestError, match="n=2 is not supported"):
            client.chat.completions.create(model="policy", messages=MESSAGES, n=2)
        with pytest.raises(openai.AuthenticationError, match="the key is wrong"):
            client.with_options(api_key="other").models.list()
