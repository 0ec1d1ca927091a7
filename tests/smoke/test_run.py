"""`buildkit run` of the image, as people type it: programs, a terminal, piped input, ports."""

import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from docker.models.images import Image

from buildkit.host.accelerators import ACCELERATORS
from buildkit.host.machine import read_machine

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _with_gpus(target: str) -> None:
    if ACCELERATORS[target].has_gpus and not read_machine().gpus[target].count:
        pytest.skip("this host has no GPU to pass to the container")


def line(image: Image, target: str, *words: str) -> list[str]:
    return [sys.executable, "-m", "buildkit", "run", "--target", target, "--image", str(image.id), *words]


def run(image: Image, target: str, *words: str, typed: str = "") -> subprocess.CompletedProcess[str]:
    command = line(image, target, *words)
    return subprocess.run(command, cwd=ROOT, input=typed, capture_output=True, text=True, timeout=120, check=False)


def test_a_program_runs_as_it_is(image: Image, target: str) -> None:
    done = run(image, target, "--", "python", "-c", "import sys; print(sys.argv[1:]); sys.exit(5)", "--grace", "3")
    assert (done.returncode, done.stdout) == (5, "['--grace', '3']\n"), done.stderr


@pytest.mark.parametrize("shown", ["docker", "podman"])
def test_the_printed_line_runs_a_program(image: Image, target: str, shown: str) -> None:
    text = run(image, target, "--print", shown, "--", "python", "-c", "print(6 * 7)").stdout
    done = subprocess.run(
        ["bash", "-c", text.replace(shown, "docker", 1)], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, "42\n"), done.stderr


def test_piped_input_reaches_an_interactive_program(image: Image, target: str) -> None:
    done = run(image, target, "-i", "--", "cat", typed="one\ntwo\n")
    assert (done.returncode, done.stdout) == (0, "one\ntwo\n"), done.stderr
    assert run(image, target, "--", "cat", typed="one\n").stdout == ""


@pytest.mark.parametrize("option", ["-it", "-i", "--interactive"])
def test_a_terminal_reaches_an_interactive_program(image: Image, target: str, option: str) -> None:
    ours, theirs = os.openpty()
    command = line(image, target, option, "--", "sh", "-c", 'read word; test -t 0 && test -t 1 && echo "heard $word"')
    with subprocess.Popen(command, cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs) as running:
        os.close(theirs)
        os.write(ours, b"hello\n")
        assert running.wait(120) == 0
    assert b"heard hello" in os.read(ours, 65536)
    os.close(ours)


def test_a_port_is_published(image: Image, target: str) -> None:
    program = ("python", "-m", "http.server", "8000", "--directory", "/etc/slipway")
    with subprocess.Popen(line(image, target, "-p", "127.0.0.1:18765:8000", "--", *program), cwd=ROOT) as running:
        try:
            assert '"target"' in fetched("http://127.0.0.1:18765/image.json", time.monotonic() + 60)
        finally:
            running.terminate()


def fetched(address: str, deadline: float) -> str:
    while True:
        try:
            with urllib.request.urlopen(address, timeout=5) as answer:
                return str(answer.read().decode())
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
