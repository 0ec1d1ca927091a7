"""Environments of verifiers and OpenEnv, unchanged, with the packages themselves in a Python of their own; a script
plays the policy. HUB_PYTHON names that Python."""

import json
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.experience.conversations.scripted_policy import pieces
from tests.trainer.experience.programs.hub_environments import (
    GAME,
    GUESS_HEAD,
    NEMO_GYM,
    NEMO_GYM_PYTHON,
    PYTHON,
    SERVED,
    TOOLS,
    WORDS,
    needs_hubs,
    serving_game,
)
from tests.trainer.experience.programs.scripted_program import FakeEngines
from tests.trainer.whole_run import ROOT
from trainer.compat.settings import load_config
from trainer.config.custom_code import CustomCode
from trainer.config.tree import Config
from trainer.data.dataset import Prompt
from trainer.errors import ConfigError
from trainer.experience.conversations.sampler import Conversations
from trainer.experience.environment import Turn, environment_class
from trainer.experience.hub_rows import with_hub_rows
from trainer.experience.trajectory import Trajectory


@pytest.fixture(autouse=True)
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`verifiers:words` in the working directory."""
    (tmp_path / "words.py").write_text(WORDS)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def play(tokenizer: Any) -> Iterator[Callable[..., list[Trajectory]]]:
    """Plays rows of an environment until all conversations have ended."""
    opened: list[Conversations] = []

    def start(hub: str, lines: dict[str, str], rows: Sequence[int] = (0,), **settings: Any) -> list[Trajectory]:
        limit = settings.pop("limit", 400)
        environment = {"hub": hub, "python": settings.pop("python", PYTHON), "arguments": settings.pop("arguments", {})}
        rollout = {"environment": environment, "segment_length": 4, "environment_timeout": 30, **settings}
        config = Config.model_validate(
            {"rollout": rollout, "data": {"max_response_length": limit, "max_prompt_length": 60}}
        )
        conversations = Conversations(config, FakeEngines(tokenizer, lines), tokenizer)  # type: ignore[arg-type]
        opened.append(conversations)
        prompts = [Prompt(row, (1, 2, 3), "", hub, "", extra_info={"split": "train", "row": row}) for row in rows]
        trajectories = conversations.begin(prompts, [100] * len(prompts), temperature=1.0)
        conversations.finish(trajectories)
        return trajectories

    yield start
    for conversations in opened:
        conversations.close()


def config_of(tmp_path: Path, *overrides: str) -> Config:
    config, _ = load_config(
        [],
        [
            f"trainer.output_dir={tmp_path / 'runs'}",
            f"rollout.environment.python={PYTHON or sys.executable}",
            *overrides,
        ],
    )
    return config


@needs_hubs
def test_the_rubric_of_verifiers_scores_and_each_of_its_functions_is_a_metric(
    tokenizer: Any, play: Callable[..., Any]
) -> None:
    right, wrong = play("verifiers:words", {"What is 0?": "0", "What is 1?": "2"}, rows=[0, 1])
    assert pieces(tokenizer, right) == [("0<|end|>", True)]
    assert tokenizer.decode(right.prompt) == "<|user|>What is 0?<|assistant|>"
    assert (right.scored.value, right.scored.info["exact"], right.scored.info["words"]) == (1.0, 1.0, 1.0)
    assert (wrong.scored.value, wrong.scored.cause) == (0.0, None)


@needs_hubs
def test_turns_of_an_environment_continue_the_tokens_that_were_sampled(
    tokenizer: Any, play: Callable[..., Any]
) -> None:
    (row,) = play("verifiers:words", {"What is 0?": "no", "sure?": "yes 0"}, arguments={"turns": 2})
    assert pieces(tokenizer, row) == [
        ("no<|end|>", True),
        ("<|user|>sure?<|assistant|>", False),
        ("yes 0<|end|>", True),
    ]
    assert (row.scored.value, row.turns) == (1.0, 2)


@needs_hubs
def test_tools_of_verifiers_run(tokenizer: Any, play: Callable[..., Any]) -> None:
    call = '<tool_call>{"name": "add", "arguments": {"first": 12, "second": 7}}</tool_call>'
    (row,) = play("verifiers:words", {"What is 0?": call, "<|tool|>19": "0"}, arguments={"tools": True})
    assert "<|tool|>19" in "".join(text for text, _ in pieces(tokenizer, row))
    assert (row.scored.value, row.scored.failure) == (1.0, "")


@needs_hubs
def test_a_conversation_that_the_limit_cuts_is_scored_as_it_is(tokenizer: Any, play: Callable[..., Any]) -> None:
    (row,) = play("verifiers:words", {"What is 0?": "0 no no no no no no"}, limit=3)
    assert (len(row.token_ids), row.truncated, row.done) == (3, True, True)
    assert (row.scored.failure, row.scored.info["exact"]) == ("", 0.0)
    (row,) = play("verifiers:words", {"What is 0?": "0"}, limit=6, arguments={"turns": 2})
    assert (row.truncated, row.scored.value, row.turns) == (True, 1.0, 1)


@needs_hubs
@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ({"raises": "lost"}, "lost"),
        ({"dies": True}, "its process ended with status 3"),
        ({"waits": 600}, "no request and no end within 5 s"),
        ({"blocks": 600}, "no request and no end within 5 s"),
    ],
)
def test_an_environment_that_fails_costs_its_conversation(
    play: Callable[..., Any], behaviour: dict[str, Any], reason: str
) -> None:
    (row,) = play("verifiers:words", {"": "no"}, arguments={"turns": 2, **behaviour}, environment_timeout=5, retries=1)
    assert reason in row.scored.failure
    assert (row.scored.cause, row.retried, row.done) == ("environment_error", ("environment_error",), True)


@needs_hubs
def test_a_row_of_the_data_set_is_a_row_of_the_run(tmp_path: Path) -> None:
    config = with_hub_rows(
        config_of(tmp_path, "rollout.environment=verifiers:words", "rollout.environment.arguments.rows=3")
    )
    (train,) = config.data.train_files
    rows = [json.loads(line) for line in train.read_text().splitlines()]
    assert len(rows) == 3
    assert rows[2] == {
        "data_source": "verifiers:words",
        "prompt": [{"role": "user", "content": "What is 2?"}],
        "reward_model": {"ground_truth": "2"},
        "extra_info": {"split": "train", "row": 2},
    }
    assert with_hub_rows(config).data == config.data  # a resumed run finds the same files


@needs_hubs
@pytest.mark.parametrize(
    ("overrides", "problem", "hint"),
    [
        (["rollout.environment=verifiers:no_such"], "Could not import 'no_such'", "rollout.environment.arguments"),
        (["rollout.environment=verifiers:words", "rollout.environment.arguments.data=false"], "no data set", "one"),
        (["rollout.environment=verifiers:words", "rollout.environment.arguments.rows=0"], "no rows", "rows"),
        (["rollout.environment=verifiers:words", "data.train_files=mine.parquet"], "has its own data set", "leave out"),
        (["rollout.environment=openenv:http://127.0.0.1:9"], "no OpenEnv server answers", "start it first"),
        (["rollout.environment=verifiers:words", "rollout.environment.python=no-such"], "no such program", "/opt/hub"),
    ],
)
def test_an_environment_that_cannot_be_trained_on_is_refused_before_the_start(
    tmp_path: Path, overrides: list[str], problem: str, hint: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        with_hub_rows(config_of(tmp_path, *overrides))
    assert problem in str(refused.value)
    assert hint in refused.value.hint


@needs_hubs
def test_a_text_game_of_openenv_is_played_to_its_end(tokenizer: Any, play: Callable[..., Any], tmp_path: Path) -> None:
    lines = {"What is 12?": "12", "What is 7?": "yes", "sure?": "yes", "What is 19?": "no", "": "no"}
    with serving_game(GAME, tmp_path) as address:
        good, fair, lost = play(f"openenv:{address}", lines, rows=[12, 7, 19])
    assert pieces(tokenizer, good)[1:] == [("<|user|>sure?<|assistant|>", False), ("yes<|end|>", True)]
    assert (good.scored.value, good.scored.info) == (0.75, {"steps": 2.0, "finished": 1.0})
    assert (fair.scored.value, fair.scored.cause) == (0.5, None)
    assert (lost.scored.cause, "lost" in lost.scored.failure) == ("environment_error", True)


@needs_hubs
def test_tools_of_an_openenv_server_run(tokenizer: Any, play: Callable[..., Any], tmp_path: Path) -> None:
    call = '<tool_call>{"name": "add", "arguments": {"first": 12, "second": 7}}</tool_call>'
    with serving_game(TOOLS, tmp_path) as address:
        (row,) = play(f"openenv:{address}", {"<|user|>{}": call, "": "yes"})
    assert "19" in pieces(tokenizer, row)[1][0]
    assert (row.scored.value, row.turns) == (1.0, 2)


def test_a_python_without_the_package_is_told_how_to_install_it(tmp_path: Path) -> None:
    overrides = ["rollout.environment=openenv:http://127.0.0.1:9", f"rollout.environment.python={sys.executable}"]
    with pytest.raises(ConfigError, match="openenv is not installed for") as refused:
        with_hub_rows(config_of(tmp_path, *overrides))
    assert "HUB/bin/pip install 'openenv>=0.10'" in refused.value.hint


def of_the_guide(start: str) -> str:
    """The code block of the guide on agents that starts with this line."""
    block = (ROOT / "docs" / "guides" / "agents.md").read_text().partition(f"    {start}")[2].partition("\n\n")[0]
    return textwrap.dedent(f"    {start}{block}\n")


@needs_hubs
def test_the_game_of_the_guide_is_the_same_three_times(play: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        f"from trainer.experience.environment import Observation\n{of_the_guide('class Guess:')}"
    )
    (tmp_path / "guess.py").write_text(
        f"import verifiers as vf\nfrom datasets import Dataset\n{of_the_guide('class Guess(vf.MultiTurnEnv):')}"
    )
    environment = environment_class(CustomCode(path=tmp_path / "own.py", name="Guess"))()
    environment.reset(Prompt(0, (1,), "0", "", ""), 0)
    assert [environment.step(Turn(text, ())).score for text in ("7", "0")] == [0.0, 1.0]
    (row,) = play("verifiers:guess", {"My number?": "7", "Again?": "0"})
    assert (row.scored.value, row.turns) == (1.0, 2)
    (row,) = play("verifiers:guess", {"My number?": "7", "Again?": "7"}, max_turns=3)
    assert (row.scored.value, row.turns, row.scored.cause) == (0.0, 3, None)
    game = of_the_guide("class Guess(Environment):")
    with serving_game(f"{GUESS_HEAD}{game}{SERVED}", tmp_path) as address:
        (row,) = play(f"openenv:{address}", {"My number?": "7", "Again?": "0"})
    assert (row.scored.value, row.turns) == (1.0, 2)


@pytest.mark.skipif(not NEMO_GYM_PYTHON, reason="NEMO_GYM_PYTHON names no Python with nemo-gym")
def test_a_resources_server_of_nemo_gym_runs_tools_and_verifies(
    tokenizer: Any, play: Callable[..., Any], tmp_path: Path
) -> None:
    parameters = {"type": "object", "properties": {"first": {"type": "integer"}, "second": {"type": "integer"}}}
    tool = {"type": "function", "name": "add", "description": "", "strict": True, "parameters": parameters}
    asked = {"input": [{"role": "user", "content": "What is 12 + 7?"}], "tools": [tool]}
    (tmp_path / "rows.jsonl").write_text(json.dumps({"responses_create_params": asked, "expected_answer": "19"}))
    call = '<tool_call>{"name": "add", "arguments": {"first": 12, "second": 7}}</tool_call>'
    with serving_game(NEMO_GYM, tmp_path, NEMO_GYM_PYTHON) as address:
        (row,) = play(
            f"nemo_gym:{address}",
            {"What is 12 + 7?": call, "<|tool|>19": "#### 19"},
            arguments={"train": "rows.jsonl", "validation": "rows.jsonl"},
            python=None,
        )
    assert "<|tool|>19" in "".join(text for text, _ in pieces(tokenizer, row))
    assert (row.scored.value, row.scored.info, row.scored.failure) == (1.0, {"calls": 1.0}, "")
