"""Who does not know the token gains nothing at the control port."""

import asyncio
import json
import socket
import time
from typing import Any

import pytest

from entrypoints.wire import handshake
from entrypoints.wire.channel import LONGEST_LINE, Channel, ChannelLostError, Message
from tests.entrypoints.conftest import Start
from tests.serving import free_port


def test_strangers_on_the_control_port_are_ignored(start_node: Start) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    worker = None
    head = start_node(0, "--no-ray", "--", "sh", "-c", "exit 7", SLIPWAY_CONTROL_PORT=str(port))
    lines = [b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b'{"hello": {"rank": 1}, "nonce": "", "proof": 5}\n', b"x" * 100_000]
    for line in lines:
        connection = connect(port)
        connection.sendall(line)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(4096):
            pass
        connection.close()
    worker = start_node(1, "--no-ray", "--", "true", SLIPWAY_CONTROL_PORT=str(port))
    told = head.wait()
    assert (told.status, worker.wait().status) == (7, 7)
    assert "Traceback" not in told.stderr


def read_to_end(connection: socket.socket) -> bytes:
    """All that the other side sends until it hangs up. Raises TimeoutError if it does not."""
    received = b""
    with connection:
        while chunk := connection.recv(4096):
            received += chunk
    return received


STRANGE_BYTES = [
    b"[" * 900 + b"\n",
    b'{"nonce": "\\ud800", "rank": 1, "host": "\\ud800", "proof": "\\ud800"}\n',
    b'{"nonce": "' + b"0" * 64 + b'", "rank": 1, "host": "\x1b]0;owned\x07", "proof": "' + b"0" * 64 + b'"}\n',
    b"\xff" * 500 + b"\n",
]


def test_what_a_stranger_sends_is_neither_a_traceback_nor_printed(start_node: Start) -> None:
    port = free_port()
    head = start_node(0, "--no-ray", "--", "sh", "-c", "exit 7", SLIPWAY_CONTROL_PORT=str(port))
    for line in STRANGE_BYTES:
        connection = connect(port)
        connection.sendall(line)
        read_to_end(connection)
    worker = start_node(1, "--no-ray", "--", "true", SLIPWAY_CONTROL_PORT=str(port))
    told = head.wait()
    assert (told.status, worker.wait().status) == (7, 7)
    assert "Traceback" not in told.stderr
    assert "\x1b" not in told.stderr


def test_a_stranger_who_only_sends_heartbeats_is_hung_up_on(start_node: Start) -> None:
    port = free_port()
    head = start_node(0, "--no-ray", "--", "true", SLIPWAY_CONTROL_PORT=str(port))
    connection = connect(port)
    connection.settimeout(20)
    connection.sendall(b'{"beat": true}\n')
    read_to_end(connection)
    head.kill()


def test_a_thousand_idle_strangers_do_not_keep_a_node_out(start_node: Start) -> None:
    port = free_port()
    limit = {"SLIPWAY_CONTROL_PORT": str(port), "SLIPWAY_TEST_NOFILE": "300"}
    head = start_node(0, "--no-ray", "--no-preflight", "--", "sh", "-c", "exit 7", **limit)
    strangers = [connect(port) for _ in range(1000)]
    worker = start_node(1, "--no-ray", "--", "true", SLIPWAY_CONTROL_PORT=str(port))
    told = head.wait()
    for stranger in strangers:
        stranger.close()
    assert (told.status, worker.wait().status) == (7, 7)
    assert "Traceback" not in told.stderr
    assert len(told.stderr.splitlines()) < 15


def test_a_flood_of_wrong_proofs_fills_neither_the_log_nor_the_causes(start_node: Start) -> None:
    port = free_port()
    hosts = {"SLIPWAY_HOSTS": "localhost,worker-1.invalid", "SLIPWAY_CONTROL_PORT": str(port)}
    head = start_node(0, "--no-ray", "--", "true", SLIPWAY_DEADLINE="6", **hosts)
    other = start_node(1, "--no-ray", "--", "true", SLIPWAY_HOSTS="localhost,other", SLIPWAY_CONTROL_PORT=str(port))
    assert "job differs" in other.wait().stderr
    for number in range(200):
        connection = connect(port)
        claim = {"nonce": "0" * 64, "rank": 1, "host": f"n{number}", "proof": "0" * 64}
        connection.sendall(json.dumps(claim).encode() + b"\n")
        read_to_end(connection)
    told = head.wait()
    assert told.stderr.count("calls itself node 1") < 30
    assert "node 1 (worker-1.invalid): refused: job differs" in told.stderr


def test_a_fake_head_does_not_end_a_worker(start_node: Start) -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", port)) as fake:
        worker = start_node(1, "--no-ray", "--", "true", SLIPWAY_CONTROL_PORT=str(port))
        for answer in (b'{"refused": "go away \x1b[2J"}', b'{"refused": "wrong token"}', b"[" * 900):
            connection, _ = fake.accept()
            connection.sendall(b'{"slipway": 2, "nonce": "' + b"0" * 64 + b'"}\n')
            connection.recv(4096)
            connection.sendall(answer + b"\n")
            connection.close()
    head = start_node(0, "--no-ray", "--", "sh", "-c", "exit 7", SLIPWAY_CONTROL_PORT=str(port))
    told = worker.wait()
    assert (told.status, head.wait().status) == (7, 7)
    assert "Traceback" not in told.stderr
    assert "\x1b" not in told.stderr


def connect(port: int) -> socket.socket:
    deadline = time.monotonic() + 10
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port))
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.mark.parametrize(("hello", "problem"), [({}, "rank is missing"), (7, "hello is 7")])
def test_a_hello_of_the_wrong_form_is_a_clear_line(start_node: Start, hello: Any, problem: str) -> None:
    """The sender knows the token: it is a node of another version, or of a mistaken user."""
    port = free_port()
    head = start_node(0, "--no-ray", "--", "true", SLIPWAY_CONTROL_PORT=str(port), SLIPWAY_DEADLINE="5")
    connect(port).close()

    async def say() -> Message:
        channel = Channel(*await asyncio.open_connection("127.0.0.1", port, limit=LONGEST_LINE))
        await handshake.demand_proof(channel, "open sesame, please", 1, "n1")
        channel.send(hello=hello)
        try:
            return await channel.receive()
        except ChannelLostError:
            return {}
        finally:
            await channel.close()

    answer = asyncio.run(say())
    told = head.wait()
    assert told.status == 12
    assert f"refused 127.0.0.1, which holds the token: it sent a message of the wrong form: {problem}" in told.stderr
    assert "Traceback" not in told.stderr
    assert hello == 7 or problem in answer["refused"]
