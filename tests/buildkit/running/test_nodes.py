import os
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from buildkit.errors import RunError
from buildkit.host.machine import read_machine
from buildkit.running.engine import Docker
from buildkit.running.flags import RunRequest, container_flags
from buildkit.running.nodes import node_commands, run_nodes
from tests.buildkit.hosts import DGX


def test_every_job_has_its_own_name_and_secret() -> None:
    first, second = (RunRequest("image", "cpu", ("true",)) for _ in range(2))
    assert first.name != second.name
    assert first.token != second.token
    assert first.token not in repr(first)


def test_the_printed_commands_are_the_ones_that_run(tmp_path: Path) -> None:
    machine = read_machine(DGX.write(tmp_path))
    request = RunRequest("slipway:cuda", "cuda", ("train",), nodes=2, volumes=("/a:/b",), user="1:2")
    for rank, command in enumerate(node_commands(Docker, request, machine)):
        words = [word for flag in container_flags(request, machine, request.name, rank) for word in flag.words]
        assert command[1 : len(words) + 1] == words
        assert command[-4:] == ["slipway:cuda", "--grace", "110", "train"]
        assert request.token not in " ".join(command)


# A docker that keeps its containers in files: `create` takes the name, `start --attach` acts as the head.
DOCKER = """#!/bin/bash
cd "$(dirname "$0")/../state" || exit 1
echo "$@" >>calls
name() { while [ $# -gt 0 ]; do [ "$1" = --name ] && echo "$2"; shift; done; }
case "$1" in
  info) echo /;;
  image) echo '[{"Id": "sha256:ab", "Size": 1, "Config": {"Labels": null}}]';;
  network) [ "$2" = create ] && touch "network-$3" || rm "network-$3";;
  create) [ ! -e refuse-create ] || { echo "no such device" >&2; exit 125; }
    container=$(name "$@"); touch "container-$container"; printf %s "$SLIPWAY_TOKEN" >token; echo "$container";;
  start) [ "$2" = --attach ] || exit 0
    [ ! -e refuse-start ] || { echo "cannot start" >&2; exit 1; }
    echo "the head says hello"
    for _ in $(seq 100); do [ ! -e killed ] || exit 143; [ -e hang ] || exit "$(cat status)"; sleep 0.1; done;;
  wait) if [[ $2 != *node0 ]]; then cat worker-status
    elif [ -e killed ]; then echo 143; elif [ -e refuse-start ]; then echo 0; else cat status; fi;;
  kill) touch killed;;
  logs) echo "the worker's last words";;
  rm) rm "container-$4";;
esac
"""


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "state"
    (tmp_path / "bin").mkdir()
    folder.mkdir()
    (tmp_path / "bin" / "docker").write_text(DOCKER)
    (tmp_path / "bin" / "docker").chmod(0o755)
    for name in ("status", "worker-status"):
        (folder / name).write_text("7\n")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return folder


def left(state: Path) -> list[str]:
    return [path.name for path in state.iterdir() if path.name.startswith(("container-", "network-"))]


def two_nodes(**changes: object) -> RunRequest:
    return replace(RunRequest("slipway:cpu", "cpu", ("true",), nodes=2, name="job"), **changes)  # type: ignore[arg-type]


def test_the_heads_status_is_the_jobs_and_nothing_is_left_with_a_fake_docker(
    state: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    request = two_nodes()
    assert run_nodes(Docker(), request) == 7
    assert "the head says hello" in capfd.readouterr().out
    assert left(state) == []
    assert (state / "token").read_text() == request.token
    assert request.token not in (state / "calls").read_text(), "other users see command lines"


def test_a_worker_with_another_status_is_shown_with_a_fake_docker(
    state: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    (state / "worker-status").write_text("13\n")
    assert run_nodes(Docker(), two_nodes()) == 7
    assert "node1 ended with 13, the head with 7" in caplog.text
    assert "the worker's last words" in capfd.readouterr().err


def test_a_refused_container_is_an_error_and_nothing_is_left_with_a_fake_docker(state: Path) -> None:
    (state / "refuse-create").touch()
    with pytest.raises(RunError, match="no such device"):
        run_nodes(Docker(), two_nodes())
    assert left(state) == []


def test_a_head_that_cannot_start_fails_the_job_with_a_fake_docker(state: Path) -> None:
    (state / "refuse-start").touch()
    with pytest.raises(RunError, match="could not start"):
        run_nodes(Docker(), two_nodes(nodes=1))
    assert left(state) == []


def test_sigterm_reaches_the_head_and_cleans_up_with_a_fake_docker(state: Path) -> None:
    (state / "hang").touch()
    (state / "worker-status").write_text("143\n")
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
    assert run_nodes(Docker(), two_nodes()) == 143
    assert "kill --signal SIGTERM job-node0" in (state / "calls").read_text()
    assert left(state) == []


def test_a_job_that_runs_for_too_long_is_killed_with_a_fake_docker(state: Path) -> None:
    (state / "hang").touch()
    assert run_nodes(Docker(), two_nodes(), limit=0.5) == 124
    assert "kill job-node0\nkill job-node1" in (state / "calls").read_text()
    assert left(state) == []


def test_a_missing_volume_is_refused_before_anything_starts_with_a_fake_docker(state: Path) -> None:
    with pytest.raises(RunError, match="/no/such"):
        run_nodes(Docker(), two_nodes(volumes=("/no/such:/data",)))
    assert "create" not in (state / "calls").read_text()
