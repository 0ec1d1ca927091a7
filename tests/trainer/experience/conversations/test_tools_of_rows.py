"""Which rows of a dataset use which tools, and what their rewards see of a conversation."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.trainer.experience.conversations.scripted_policy import (
    GSM8K,
    JUDGE,
    FakeEngines,
    check,
    converse,
    schema,
    settings,
)
from trainer.config.tree import Config
from trainer.data.dataset import Prompt, PromptDataset, PromptSampler
from trainer.errors import ConfigError, DataError
from trainer.experience.collector import Collector
from trainer.experience.conversations.agents import check_agents
from trainer.experience.conversations.sampler import Conversations
from trainer.experience.run_data import RunData
from trainer.rewards.answer import Answer, Scored


def write(directory: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    fixed = {"data_source": "openai/gsm8k", "prompt": [{"role": "user", "content": "What?"}]}
    truth = {"reward_model": {"ground_truth": "19"}}
    pq.write_table(pa.Table.from_pylist([{**fixed, **truth, **row} for row in rows]), directory / "rows.parquet")
    return directory / "rows.parquet"


def test_tools_are_in_the_prompts_of_the_rows_that_use_them(tokenizer: Any, tmp_path: Path) -> None:
    config = settings(tmp_path, GSM8K, {**GSM8K, "tool_schema": schema("other")}, agent="auto")
    rows = [
        {"agent_name": "tool_agent", "extra_info": {"tool_selection": None}},
        {"agent_name": "tool_agent", "extra_info": {"tool_selection": ["other"]}},
        {"agent_name": "single_turn_agent", "extra_info": {"tool_selection": None}},
    ]
    file = write(tmp_path, rows)
    data = config.data.model_copy(update={"max_prompt_length": 200})
    dataset = PromptDataset([file], tokenizer, data)
    starts = [tokenizer.decode(dataset[row].token_ids).split("<|user|>")[0] for row in range(3)]
    assert starts == ["[calc_gsm8k_reward][other]", "[other]", ""]
    check_agents(config, dataset)
    engines = FakeEngines(tokenizer, ["a"])
    with closing(Conversations(config, engines, tokenizer)) as conversations:  # type: ignore[arg-type]
        begun = conversations.begin([dataset[row] for row in range(3)], [1, 2, 3], temperature=1.0)
    assert [row.environment is not None for row in begun] == [True, True, False]


def test_tools_that_no_row_would_use_are_refused(tokenizer: Any, tmp_path: Path) -> None:
    config = settings(tmp_path, GSM8K, agent="auto")
    data = config.data.model_copy(update={"max_prompt_length": 200})
    with pytest.raises(ConfigError, match="no row uses the tools"):
        check_agents(config, PromptDataset([write(tmp_path, [{}])], tokenizer, data))
    with pytest.raises(ConfigError, match="rows name the agent 'mine'"):
        check_agents(config, PromptDataset([write(tmp_path, [{"agent_name": "mine"}])], tokenizer, data))
    with_users = settings(tmp_path, GSM8K, users=[JUDGE])
    with pytest.raises(DataError, match="names the user None"):
        check_agents(with_users, PromptDataset([write(tmp_path, [{}])], tokenizer, data))


class Rewards:
    """Keeps what the reward would be computed from."""

    def __init__(self) -> None:
        self.asked: list[Answer] = []

    def __len__(self) -> int:
        return 1

    def attempt(self, tasks: Any, _timeout: float) -> tuple[dict[int, list[Scored]], dict[int, Exception]]:
        (asked,) = [task.arguments[0] for task in tasks.values()]
        self.asked += asked
        return {0: [Scored(1.0) for _ in asked]}, {}


@pytest.mark.parametrize("text", ["policy", "conversation"])
def test_rewards_see_the_conversation_as_in_verl(tokenizer: Any, tmp_path: Path, text: str) -> None:
    config = settings(tmp_path, GSM8K).model_copy(
        update={"reward": Config.model_validate({"reward": {"text": text}}).reward}
    )
    row, _ = converse(tokenizer, config, [check("19"), "#### 19"])
    rewards, nothing = Rewards(), [None]
    data = RunData(tokenizer, nothing, nothing, PromptSampler(4, 4, shuffle=False, seed=0))  # type: ignore[arg-type]
    collector = Collector(config, None, rewards, data)  # type: ignore[arg-type]
    prompts = [Prompt(0, (1, 2), "19", "openai/gsm8k", "What?", {"index": 7})]
    scored = collector.score(prompts, [row])
    (answer,) = rewards.asked
    assert ("Current parsed" in answer.response) == (text == "conversation")
    assert answer.extra_info == {"index": 7, "num_turns": 4, "tool_rewards": [0.0], "turn_scores": []}
    metrics = collector.summarized(prompts * 4, [row] * 4, scored * 4).metrics
    assert (metrics["rollout/turns"], metrics["rollout/tool_calls"], metrics["rollout/failed_tool_calls"]) == (2, 1, 0)
    collector.close()
