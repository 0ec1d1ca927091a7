"""Programs that are scored by running them, in real sandboxes."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.serving import serving
from trainer.config.sections.reward import RewardConfig
from trainer.errors import RewardError
from trainer.rewards.answer import Answer, Scored
from trainer.rewards.function import longest_scoring
from trainer.rewards.processes.pool import RewardPool
from trainer.rewards.rules.code import code
from trainer.rewards.sandbox.fusion import UnreachableSandboxError
from trainer.rewards.sandbox.programs import Limits, run_tests

ECHO = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7"]}
ADD = {"fn_name": "add", "inputs": ["1\n2", [3, 4]], "outputs": ["3", [7]]}


def score(program: str, tests: object, seconds: float = 5.0, memory_mb: int = 1024, url: str | None = None) -> float:
    return code(f"Sure:\n```python\n{program}\n```\nDone.", tests, 10, seconds, memory_mb, url)["score"]


PROGRAMS = pytest.mark.parametrize(
    ("program", "tests", "expected"),
    [
        ("a, b = map(int, input().split())\nprint(a + b)", ECHO, 1.0),
        ("a, b = map(int, input().split())\nprint(a + b)", json.dumps(ECHO), 1.0),
        ("if __name__ == '__main__':\n    print(float(sum(map(int, sys.stdin.read().split()))))", ECHO, 1.0),
        ("print(3)", ECHO, 0.5),
        ("print(3); exit()", ECHO, 0.5),
        ("print(1000001)", {"inputs": [""], "outputs": ["1000000"]}, 0.0),
        ("print('+7', 1000000.1)", {"inputs": [""], "outputs": ["7 1000000"]}, 1.0),
        ("print(3); exit(1)", ECHO, 0.0),
        ("print(3", ECHO, 0.0),
        ("def add(a, b): return a + b", ADD, 1.0),
        ("class Solution:\n    def add(self, a: int, b: List[int]): print('noise'); return a + b", ADD, 1.0),
        ("def add(a, b): return 3", ADD, 0.5),
        ("def other(a, b): return a + b", ADD, 0.0),
    ],
)


@PROGRAMS
def test_a_program_earns_the_share_of_tests_that_it_passes(program: str, tests: object, expected: float) -> None:
    assert score(program, tests) == expected


def test_a_result_that_is_too_deep_to_read_is_a_wrong_answer() -> None:
    program = """
def add(a, b):
    os.write(1, b"[" * 200_000)
    os._exit(0)
import os
"""
    assert score(program, ADD) == 0.0


@pytest.mark.parametrize(
    "tests",
    [
        {"inputs": ["1"]},
        {"inputs": ["1"], "outputs": 1},
        {"inputs": "1", "outputs": "1"},
        {"inputs": {"1": 1}, "outputs": {"1": 1}},
        {"inputs": ["no JSON"], "outputs": ["1"], "fn_name": "add"},
        {"inputs": [1], "outputs": [1], "fn_name": "add"},
        '["inputs", "outputs"]',
        "[" * 100_000,
        7,
    ],
)
def test_what_is_no_tests_is_refused_by_name(tests: object) -> None:
    with pytest.raises(RewardError, match="needs tests, not the ground truth"):
        score("print(1)", tests)


class Fusion(BaseHTTPRequestHandler):
    """A server that speaks SandboxFusion's protocol and runs programs as they are, with Python."""

    def do_POST(self) -> None:
        job = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        command = [sys.executable, "-c", "import sys, json\nfrom typing import *\n" + job["code"]]
        ended = subprocess.run(command, input=job["stdin"], capture_output=True, text=True, timeout=30, check=False)
        status = "Success" if ended.returncode == 0 else "Failed"
        result = {"status": "Finished", "return_code": ended.returncode, "stdout": ended.stdout, "stderr": ended.stderr}
        body = json.dumps({"status": status, "message": "", "compile_result": None, "run_result": result}).encode()
        self.send_response(500 if self.path == "/broken" else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def fusion() -> Iterator[str]:
    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Fusion)) as server:
        yield f"http://127.0.0.1:{server.server_port}"


@PROGRAMS
def test_a_sandbox_server_gives_the_same_scores(program: str, tests: object, expected: float, fusion: str) -> None:
    assert score(program, tests, url=f"{fusion}/run_code") == expected


def test_a_server_that_fails_costs_the_response(fusion: str) -> None:
    with pytest.raises(UnreachableSandboxError, match="answered with status 500"):
        score("print(3)", ECHO, url=f"{fusion}/broken")


@pytest.mark.parametrize("truth", ["not json", {"inputs": ["1"], "outputs": []}, {}, 3])
def test_a_truth_without_tests_is_refused(truth: object) -> None:
    with pytest.raises(RewardError, match="the reward rule code needs tests"):
        score("print(1)", truth)


def outputs(program: str) -> str | None:
    return run_tests(program, None, [""], Limits())[0]


def test_a_program_sees_neither_the_environment_nor_the_expected_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hidden")
    assert "hidden" not in (outputs("import os; print(dict(os.environ))") or "hidden")
    looks = "import gc\nprint([one for one in gc.get_objects() if isinstance(one, dict) and 'outputs' in one])"
    assert outputs(looks) == "[]\n"


def test_a_program_that_hangs_costs_its_own_time_only() -> None:
    started = time.monotonic()
    assert score("while True: pass", ECHO, seconds=0.5) == 0.0
    assert score("import signal, time\nsignal.signal(signal.SIGTERM, lambda *_: 0)\ntime.sleep(99)", ECHO, 0.5) == 0.0
    assert time.monotonic() - started < 20


def test_many_programs_that_hang_cost_bounded_time_and_no_good_answer() -> None:
    """Four processes; every eighth answer is good, with time enough on a busy machine."""
    settings = RewardConfig(code_seconds=2)
    tests = {"inputs": [""], "outputs": ["3"]}
    programs = ["print(3)" if number % 8 == 0 else "import time\ntime.sleep(99)" for number in range(16)]
    asked = [Answer(f"```python\n{program}\n```", tests, "taco") for program in programs]
    started = time.monotonic()
    with RewardPool(settings, processes=4) as pool:
        scores = pool.score(asked)
    assert time.monotonic() - started < longest_scoring(settings, asked)
    assert [result.value for result in scores] == [float(program == "print(3)") for program in programs]
    assert not any(result.failure for result in scores)


def test_code_runs_in_reward_processes_by_its_data_source() -> None:
    with RewardPool(RewardConfig(), processes=2) as pool:
        scores = pool.score([Answer(f"```python\nprint({n})\n```", ECHO, "taco") for n in (3, 4)])
    assert scores == [Scored(0.5, info={"solved": 0.0}), Scored(0.0, info={"solved": 0.0})]
