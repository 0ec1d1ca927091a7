"""Custom rewards in real processes: a failure costs one sample and not the run."""

import datetime
import json
import math
import os
import signal
import time
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import psutil
import pytest

from trainer.cluster.place import RankPlace
from trainer.config.sections.reward import RewardConfig, RewardFunction
from trainer.errors import ConfigError, DataError, RewardError
from trainer.rewards.answer import Answer, Reply, Scored
from trainer.rewards.function import longest_scoring
from trainer.rewards.processes.pool import RewardPool
from trainer.roles.reward import own_processes

FUNCTION = """
import os
import resource
import subprocess
import time

def compute_score(data_source, solution_str, ground_truth, extra_info):
    print("noise on standard output")
    match solution_str:
        case "hang": time.sleep(60)
        case "raise": raise KeyError("no such thing")
        case "die": os._exit(3)
        case "fork" if os.fork() == 0: return 7.0
        case "environment": return {"score": len(set(os.environ) & {"RAY_AUTH_TOKEN", "API_KEY"}), "pid": os.getpid()}
        case "allocate": bytearray(2**32)
        case "limits": return resource.getrlimit(resource.RLIMIT_CORE)[1]
        case "child": subprocess.Popen(["sleep", "601"]); time.sleep(60)
        case "nan": return float("nan")
        case "text": return "1.0"
        case "mapping": return {"score": 0.5, "length": 3}
    if solution_str.startswith("write "):  # to every open file, as a cheat that looks for the answers' channel
        for number in range(3, 256):
            try: os.write(number, solution_str.removeprefix("write ").encode() + b"\\n")
            except OSError: pass
    return float(solution_str == ground_truth) + extra_info.get("bonus", 0)
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reward") / "mine.py"
    path.write_text(FUNCTION)
    return path


@pytest.fixture
def pool(file: Path) -> Iterator[RewardPool]:
    settings = RewardConfig(custom_function=RewardFunction(path=file), timeout=1.0, failure_score=-1.0)
    with RewardPool(settings, processes=2) as made:
        yield made


def answers(*responses: str) -> list[Answer]:
    return [Answer(response, "right", "here", {"bonus": 2}) for response in responses]


@pytest.mark.parametrize(
    ("parameters", "settings", "words"),
    [
        (
            "solution_str, ground_truth",
            {},
            r"compute_score\(solution_str, ground_truth\) cannot be called .*data_source",
        ),
        ("prompt, response", {}, "cannot be called as it will be"),
        ("*answers", {}, "cannot be called as it will be"),
        ("data_source, solution_str, ground_truth, extra_info, judge", {}, "missing a required argument: 'judge'"),
        ("data_source, solution_str, ground_truth, extra_info", {"kwargs": {"judge": 1}}, "unexpected keyword.*judge"),
        ("data_source, solution_str, ground_truth, extra_info", {"batched": True}, "'data_source'"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_before_anything_is_scored(
    tmp_path: Path, parameters: str, settings: dict[str, object], words: str
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(f"def compute_score({parameters}): return 1.0")
    function = RewardFunction.model_validate({"path": path, **settings})
    with (
        RewardPool(RewardConfig(custom_function=function), 1) as pool,
        pytest.raises(ConfigError, match=words) as error,
    ):
        pool.check()
    assert str(error.value).startswith("reward.custom_function: compute_score(")
    assert error.value.hint.startswith("it gets data_source")


@pytest.mark.parametrize(
    "source",
    [
        "def compute_score(**given): return 1.0",
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None, **rest): return 1.0",
        "async def compute_score(data_source, solution_str, ground_truth, extra_info): return 1.0",
        "class compute_score(float):\n    def __new__(cls, **given): return 1.0",
    ],
)
def test_a_function_that_can_be_called_is_ready(tmp_path: Path, source: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(source)
    with RewardPool(RewardConfig(custom_function=RewardFunction(path=path)), 1) as pool:
        pool.check()
        assert [score.value for score in pool.score(answers("right"))] == [1.0]


def test_the_traceback_of_a_failure_shows_the_users_own_frames(pool: RewardPool, file: Path) -> None:
    (failed,) = pool.score(answers("raise"))
    assert (failed.failure, failed.cause) == ("KeyError: 'no such thing'", "reward_error")
    first, frame, *_, last = failed.traceback.strip().splitlines()
    assert (first, last) == ("Traceback (most recent call last):", failed.failure)
    assert f'File "{file}"' in frame


def test_scores_come_in_the_order_of_the_answers(pool: RewardPool) -> None:
    scores = pool.score(answers("right", "wrong", "mapping", "right", "wrong"))
    assert [score.value for score in scores] == [3.0, 2.0, 0.5, 3.0, 2.0]
    assert not any(score.failure for score in scores)
    assert pool.score([]) == []


def test_a_reward_that_hangs_raises_or_dies_costs_its_own_sample_only(pool: RewardPool) -> None:
    pool.score(answers("right", "right"))  # both processes are up
    started = time.monotonic()
    scores = pool.score(answers("right", "hang", "raise", "die", "right", "right"))
    assert time.monotonic() - started < 30
    assert [score.value for score in scores] == [3.0, -1.0, -1.0, -1.0, 3.0, 3.0]
    assert [score.failure for score in scores if score.failure] == [
        "no reward within 1 s",
        "KeyError: 'no such thing'",
        "the reward process died",
    ]
    assert [score.cause for score in scores if score.cause] == ["reward_timeout", "reward_error", "reward_error"]
    assert [score.value for score in pool.score(answers("right", "right", "right"))] == [3.0, 3.0, 3.0]


@pytest.mark.parametrize(
    "written",
    ['{"scored": {"value": 1.0}}', '{"number": "1", "score', "noise", "null", "[]", '{"number": 0}\\n{"number": 1}'],
)
def test_what_a_function_writes_into_the_channel_fails_its_own_sample(pool: RewardPool, written: str) -> None:
    scores = pool.score(answers("right", f"write {written}", "right", "right"))
    assert [score.value for score in scores] == [3.0, -1.0, 3.0, 3.0]
    assert scores[1].failure.startswith("the reward process wrote")


def test_a_reply_that_nobody_asked_for_fails_one_sample(pool: RewardPool) -> None:
    reply = json.dumps({"number": "0", **Reply(Scored(9.0)).to_json()})
    scores = pool.score(answers("right", f"write {reply}", "right"))
    assert [score.value for score in scores] == [3.0, -1.0, 3.0]
    assert "wrote an unexpected reward" in scores[1].failure


def test_a_child_that_the_function_forks_does_not_answer(pool: RewardPool) -> None:
    assert [score.value for score in pool.score(answers("fork", "right", "wrong", "right"))] == [2.0, 3.0, 2.0, 3.0]


def test_everything_that_a_lost_process_started_ends_with_it(pool: RewardPool) -> None:
    assert pool.score(answers("child"))[0].failure == "no reward within 1 s"
    # The signal is sent; a process without a parent that waits for it stays as a zombie.
    deadline = time.monotonic() + 60
    while any(
        process.info["cmdline"] == ["sleep", "601"] and process.info["status"] != psutil.STATUS_ZOMBIE
        for process in psutil.process_iter(["cmdline", "status"])
    ):
        assert time.monotonic() < deadline


def test_a_function_gets_no_secrets_unless_they_are_named(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "planted")
    monkeypatch.setenv("API_KEY", "planted")
    for named, expected in ([], 0.0), (["API_KEY"], 1.0):
        settings = RewardConfig(custom_function=RewardFunction(path=file), variables=named)
        with RewardPool(settings, processes=1) as pool:
            assert pool.score(answers("environment"))[0].value == expected


def test_a_function_that_allocates_too_much_costs_its_own_sample(file: Path) -> None:
    settings = RewardConfig(custom_function=RewardFunction(path=file), process_memory_gib=1)
    with RewardPool(settings, processes=1) as pool:
        scores = pool.score(answers("allocate", "limits"))
    assert scores[0].failure.startswith("MemoryError")
    assert scores[1].value == 0.0


def test_a_process_that_dies_while_it_waits_costs_nothing(pool: RewardPool) -> None:
    for _ in range(2):
        (environment, *_) = pool.score(answers("environment", "right"))
        pid = int(environment.info["pid"])
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert [score.value for score in pool.score(answers("right", "wrong"))] == [3.0, 2.0]


def test_512_answers_that_hang_cost_512_samples(file: Path) -> None:
    settings = RewardConfig(custom_function=RewardFunction(path=file), timeout=0.01)
    hanging = answers(*["hang"] * 512)
    with RewardPool(settings, processes=8) as pool:
        scores = pool.score([*hanging[:16], *answers("right")])
    assert {score.failure for score in scores[:16]} == {"no reward within 0.01 s"}
    assert longest_scoring(settings, hanging) > 512 * 0.01


def test_values_of_parquet_files_reach_the_function(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return float(repr(ground_truth) == extra_info['shown'])\n"
    )
    truth = [b"\x00\xff", Decimal("0.10"), datetime.date(2026, 1, 2), {"a": None, "b": [1.5, True]}, "\ud800\u2028"]
    truth += [datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC), datetime.timedelta(seconds=1.5), math.inf]
    settings = RewardConfig(custom_function=RewardFunction(path=tmp_path / "mine.py"))
    with RewardPool(settings, processes=1) as pool:
        assert pool.score([Answer("", truth, extra_info={"shown": repr(truth)})])[0] == Scored(1.0)
        with pytest.raises(DataError, match="cannot be sent a complex"):
            pool.score([Answer("", 1j)])


@pytest.mark.parametrize(("processes", "workers", "expected"), [(8, 3, [2, 3, 3]), (1, 2, [1, 1]), (4, 1, [4])])
def test_reward_workers_share_the_processes_of_their_node(processes: int, workers: int, expected: list[int]) -> None:
    settings = RewardConfig(processes=processes)
    assert [own_processes(settings, RankPlace(0, 1, "here", "cpu", at, workers)) for at in range(workers)] == expected


def test_a_slow_answer_costs_those_behind_it_nothing(pool: RewardPool) -> None:
    """Each process gets several answers in one message; those behind one that hangs are scored by another process."""
    scores = pool.score(answers(*["right"] * 20, "hang", *["wrong"] * 20, "die", *["right"] * 20))
    assert [score.value for score in scores] == [3.0] * 20 + [-1.0] + [2.0] * 20 + [-1.0] + [3.0] * 20


def test_a_function_gets_structured_truths_tokens_and_its_own_arguments(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "async def judge(data_source, solution_str, ground_truth, extra_info, response_ids, scale):\n"
        "    return {'score': scale * len(ground_truth['tests']), 'tokens': len(response_ids),\n"
        "            'token_rewards': [(0, 0.5)]}\n"
    )
    function = RewardFunction(path=tmp_path / "mine.py", name="judge", kwargs={"scale": 2})
    with RewardPool(RewardConfig(custom_function=function), processes=1) as pool:
        (score,) = pool.score([Answer("hi", {"tests": [1, 2]}, sampled_ids=(7, 8))])
    assert score == Scored(4.5, info={"tokens": 2.0}, by_token=((0, 0.5),))


def test_a_batched_function_sees_all_answers_in_one_call(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def compute_score(data_sources, solution_strs, ground_truths, extra_infos, bonus):\n"
        "    if 'raise' in solution_strs: raise ValueError('no')\n"
        "    if 'short' in solution_strs: return [1.0]\n"
        "    longest = max(map(len, solution_strs))\n"
        "    return [bonus + len(text) / longest for text in solution_strs]\n"
    )
    function = RewardFunction(path=tmp_path / "mine.py", kwargs={"bonus": 1.0}, batched=True)
    with RewardPool(RewardConfig(custom_function=function), processes=4) as pool:
        assert [score.value for score in pool.score(answers("a", "aaaa", *["aa"] * 40))] == [1.25, 2.0] + [1.5] * 40
        assert [score.failure for score in pool.score(answers("a", "raise"))] == ["ValueError: no"] * 2
        with pytest.raises(RewardError, match="returned 1 scores for 2 responses"):
            pool.score(answers("a", "short"))


@pytest.mark.parametrize(("response", "shown"), [("nan", "nan"), ("text", "'1.0'")])
def test_a_reward_that_is_not_finite_is_refused_with_the_response(pool: RewardPool, response: str, shown: str) -> None:
    with pytest.raises(RewardError) as caught:
        pool.score(answers("right", response))
    assert f"returned {shown} for the response '{response}' (ground truth 'right', data source 'here')" in str(
        caught.value
    )
    assert "finite number" in caught.value.hint


def test_a_regular_expression_that_backtracks_for_ever_costs_one_sample() -> None:
    settings = RewardConfig(name="regex", pattern=r"^(a+)+$", timeout=1.0)
    with RewardPool(settings, processes=1) as pool:
        scores = pool.score([Answer("aaa", "aaa"), Answer("a" * 64 + "b", "a"), Answer("aa", "aa")])
    assert [score.failure for score in scores] == ["", "no reward within 1 s", ""]
    assert scores[0].value == 1.0


@pytest.mark.parametrize(
    ("content", "name", "words", "hint"),
    [
        (None, None, "no such file", "every node"),
        (
            "def compute_scores(): ...",
            None,
            "has no compute_score to call",
            "reward.custom_function.name=compute_scores",
        ),
        ("1 / 0", None, "cannot be imported: ZeroDivisionError", "fix that file"),
        ("value = 3", "value", "has no value to call", "reward.custom_function.name"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_refused(
    tmp_path: Path, content: str | None, name: str | None, words: str, hint: str
) -> None:
    path = tmp_path / "mine.py"
    if content is not None:
        path.write_text(content)
    settings = RewardConfig(custom_function=RewardFunction(path=path, name=name))
    with pytest.raises(ConfigError) as caught, RewardPool(settings, processes=1) as pool:
        pool.score(answers("right"))
    assert words in str(caught.value)
    assert str(path) in str(caught.value)
    assert hint in caught.value.hint


def test_a_sandbox_that_runs_no_programs_is_a_failure_and_not_a_wrong_program() -> None:
    settings = RewardConfig.model_validate({"name": "code", "code_sandbox_url": "http://127.0.0.1:1/run_code"})
    answer = Answer("```python\nprint(1)\n```", {"inputs": [""], "outputs": ["1"]})
    with RewardPool(settings, 1) as pool:
        (failed,) = pool.score([answer])
    assert failed.cause == "reward_sandbox"
    assert "the sandbox at http://127.0.0.1:1/run_code does not answer" in failed.failure
