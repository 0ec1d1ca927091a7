"""A real HTTP server that scores responses, and its failures."""

import json
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.serving import serving
from trainer.config.overrides import parse_overrides
from trainer.config.sections.reward import RewardConfig
from trainer.config.sections.reward import RewardServer as ServerConfig
from trainer.errors import ConfigError
from trainer.rewards.answer import Answer, Scored
from trainer.rewards.server import RewardServer

asked: Counter[str] = Counter()


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        answers = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["answers"]
        asked.update(answer["solution_str"] for answer in answers)
        status, reply = self.reply(answers)
        body = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def reply(self, answers: list[dict[str, Any]]) -> tuple[int, Any]:
        texts = [answer["solution_str"] for answer in answers]
        if "refuse" in texts:
            return 400, {}
        if "later" in texts and asked["later"] < 3:
            return 503, {}
        if "short" in texts:
            return 200, {"scores": []}
        return 200, {"scores": [self.score(answer) for answer in answers]}

    def score(self, answer: dict[str, Any]) -> Any:
        if answer["solution_str"] == "null":
            return None
        return {"score": float(answer["solution_str"] in answer["ground_truth"]["accepted"]), "tone": 0.5}

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    asked.clear()
    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as server:
        yield f"http://127.0.0.1:{server.server_port}/score"


def scored(url: str, *responses: str, **server: Any) -> list[Scored]:
    settings = RewardConfig(server=ServerConfig(url=url, batch_size=2, **server), failure_score=-1.0)
    return RewardServer(settings).score([Answer(text, {"accepted": ["yes", "later"]}) for text in responses])


def test_scores_come_in_the_order_of_the_answers(url: str) -> None:
    scores = scored(url, "yes", "no", "yes", "yes", "no")
    assert [score.value for score in scores] == [1.0, 0.0, 1.0, 1.0, 0.0]
    assert scores[0].info == {"tone": 0.5}


def test_a_failure_costs_one_sample(url: str) -> None:
    scores = scored(url, "yes", "refuse", "null", "yes")
    assert [score.value for score in scores] == [1.0, -1.0, -1.0, 1.0]
    assert "status 400" in scores[1].failure
    assert scores[2].failure == "the reward server returned null"
    assert [score.cause for score in scores] == [None, "reward_server", "reward_error", None]


def test_a_server_that_is_busy_is_asked_again(url: str) -> None:
    assert [score.value for score in scored(url, "later", "no")] == [1.0, 0.0]
    assert asked["later"] == 3


def test_a_server_that_is_not_there_costs_every_sample() -> None:
    scores = scored("http://127.0.0.1:1/score", "yes", "no", retries=0)
    assert [score.value for score in scores] == [-1.0, -1.0]
    assert "does not answer" in scores[0].failure
    assert {score.cause for score in scores} == {"reward_server"}


def test_another_number_of_scores_costs_one_sample(url: str) -> None:
    short, right = scored(url, "short", "yes")
    assert (short.cause, right.value) == ("reward_server", 1.0)
    assert "for 1 answers" in short.failure


def test_a_server_and_a_function_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="both score responses"):
        parse_overrides(["reward.server.url=http://a/b", "reward.custom_function.path=/mine.py"])
    with pytest.raises(ConfigError, match=r"reward.server.url=a"):
        parse_overrides(["reward.server.url=a"])
