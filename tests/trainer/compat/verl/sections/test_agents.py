"""verl's keys for tools, simulated users and agent loops."""

from pathlib import Path
from typing import Any

import pytest

from trainer.compat.settings import load_config
from trainer.errors import ConfigError

ROLLOUT = "actor_rollout_ref.rollout"
TOOLS = f"{ROLLOUT}.multi_turn.tool_config_path=/tools.yaml"


def loaded(*settings: str) -> Any:
    return load_config(["verl"], [f"{ROLLOUT}.{setting}" for setting in settings])


def test_a_multi_turn_script_keeps_its_meaning() -> None:
    config, notes = load_config(
        ["verl"],
        [
            *(f"{ROLLOUT}.multi_turn.enable=True", TOOLS, f"{ROLLOUT}.multi_turn.format=hermes"),
            *(f"{ROLLOUT}.multi_turn.max_assistant_turns=5", f"{ROLLOUT}.multi_turn.max_parallel_calls=2"),
            *(f"{ROLLOUT}.multi_turn.max_tool_response_length=512", f"{ROLLOUT}.agent.num_workers=4"),
            *(f"{ROLLOUT}.multi_turn.tool_response_truncate_side=left", "data.return_raw_chat=True"),
            f"{ROLLOUT}.multi_turn.interaction_config_path=/users.yaml",
        ],
    )
    rollout, tools = config.rollout, config.rollout.tools
    assert (config.data.tools_file, rollout.interactions_file) == (Path("/tools.yaml"), Path("/users.yaml"))
    assert (rollout.agent, rollout.max_turns, config.reward.text) == ("tools", 5, "conversation")
    assert (tools.format, tools.max_parallel_calls, tools.max_response_length) == ("hermes", 2, 512)
    assert tools.truncate_side == "left"
    assert rollout.environment_timeout > 600
    assert rollout.environment_calls > 1000
    assert any("rows without agent_name use the tools" in note for note in notes)


@pytest.mark.parametrize(
    ("given", "turns"),
    [
        ([], None),
        (["multi_turn.max_assistant_turns=null"], None),
        (["multi_turn.max_user_turns=2"], 3),  # the policy speaks once more than it is answered
        (["multi_turn.max_user_turns=2", "multi_turn.max_assistant_turns=2"], 2),
        (["multi_turn.max_user_turns=1", "multi_turn.max_assistant_turns=9"], 2),
        (["multi_turn.max_user_turns=0", "multi_turn.max_assistant_turns=0"], None),
    ],
)
def test_turns_are_unlimited_unless_verl_limits_them(given: list[str], turns: int | None) -> None:
    config, _ = load_config(["verl"], [TOOLS, *(f"{ROLLOUT}.{setting}" for setting in given)])
    assert config.rollout.max_turns == turns


@pytest.mark.parametrize(("name", "agent"), [("tool_agent", "tools"), ("single_turn_agent", "single_turn")])
def test_the_agent_of_rows_that_name_none(name: str, agent: str) -> None:
    config, notes = loaded(f"agent.default_agent_loop={name}", "multi_turn.enable=True")
    assert config.rollout.agent == agent
    assert not notes


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("agent.default_agent_loop=my_agent", "there are no agent loops of your own"),
        ("agent.agent_loop_config_path=agent.yaml", "is not supported here"),
        ("+agent.agent_loop_manager_class=a.B", "is not supported here"),
        ("multi_turn.format=gpt-oss", "rollout.tools.format"),
        ("multi_turn.use_inference_chat_template=True", "is not supported here"),
        ("multi_turn.function_tool_path=tools.py", "is not supported here"),
        ("multi_turn.max_user_turns=many", "expected a whole number"),
        ("multi_turn.tool_response_truncate_side=top", "truncate_side"),
    ],
)
def test_what_has_no_counterpart_is_refused(setting: str, reason: str) -> None:
    plus = "+" if setting.startswith("+") else ""
    with pytest.raises(ConfigError, match=reason):
        load_config(["verl"], [f"{plus}{ROLLOUT}.{setting.removeprefix('+')}"])


def test_multi_turn_without_tools_says_so() -> None:
    _, notes = loaded("multi_turn.enable=True")
    assert any("no tools and no interactions are given" in note for note in notes)


@pytest.mark.parametrize(
    ("line", "most"),
    [
        ([f"{ROLLOUT}.multi_turn.interaction_config_path=/users.yaml"], 0.0),  # a user that raises ends verl's run
        ([f"{ROLLOUT}.multi_turn.interaction_config_path=/users.yaml", "rollout.environment_timeout=10"], 0.5),
        ([f"{ROLLOUT}.multi_turn.tool_config_path=/tools.yaml"], 0.5),  # the policy reads what a tool raises
    ],
)
def test_failures_of_users_end_the_run_as_in_verl(line: list[str], most: float) -> None:
    config, _ = load_config([], line)
    assert config.rollout.max_failed_share == most
