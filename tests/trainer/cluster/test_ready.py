"""A process that was started beside Ray waits for it."""

import os
import subprocess
import sys
import threading

import pytest

from trainer.cluster.ready import READY_FD, wait_for_ray
from trainer.errors import WorkerError

WAITS = (
    "import os; from trainer.cluster.ready import wait_for_ray; wait_for_ray(); wait_for_ray(); print('up', os.environ)"
)


@pytest.mark.parametrize(("byte", "status"), [(b"1", 0), (b"", WorkerError.exit_code)])
def test_it_goes_on_with_a_byte_and_ends_quietly_without(byte: bytes, status: int) -> None:
    reader, writer = os.pipe()
    command = [sys.executable, "-c", WAITS]
    with subprocess.Popen(
        command,
        env=os.environ | {READY_FD: str(reader)},
        pass_fds=[reader],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        os.close(reader)
        assert process.poll() is None
        os.write(writer, byte)
        os.close(writer)
        stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (status, "")
    assert stdout.startswith("up") == bool(byte)
    assert READY_FD not in stdout  # no process below may read from it


def test_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    monkeypatch.setenv(READY_FD, str(reader))
    waiting = threading.Thread(target=wait_for_ray)
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive()
    os.write(writer, b"1")
    waiting.join(10)
    assert not waiting.is_alive()
    os.close(writer)


@pytest.mark.parametrize("given", ["", "three", "9999"])
def test_a_number_of_no_open_file_is_refused(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv(READY_FD, given)
    with pytest.raises(WorkerError, match=READY_FD):
        wait_for_ray()
