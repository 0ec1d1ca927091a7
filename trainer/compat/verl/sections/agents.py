"""Keys of verl's sections `multi_turn` and `agent` of the rollout."""

from trainer.compat.verl.rules import (
    Given,
    Rule,
    Translation,
    Value,
    is_true,
    mapped,
    no_effect,
    only,
    refused,
    to,
    whole,
    word,
)
from trainer.compat.verl.shared import ROLLOUT
from trainer.errors import ConfigError

_TURNS = f"{ROLLOUT}.multi_turn"
_AGENT = f"{ROLLOUT}.agent.default_agent_loop"

# verl has no limits unless they are given, waits for tools, and scores what they say along with the policy's words.
_AS_IN_VERL: dict[str, Value] = {
    "rollout.max_turns": None,
    "rollout.environment_timeout": 3600,
    "rollout.environment_calls": 1024,
    "reward.text": "conversation",
}


def multi_turn(key: str, value: Value, given: Given) -> Translation:
    """Earlier versions of verl then used the tools for all rows. verl 0.9 uses them for rows that name tool_agent, or
    with `default_agent_loop`; without either it samples single turns."""
    if not is_true(value):
        return only("false")(key, value, given)
    if _AGENT in given:
        return Translation({}, inherited=_AS_IN_VERL)
    files = [given.get(f"{_TURNS}.{name}_config_path") for name in ("tool", "interaction")]
    if all(word(file) == "null" for file in files):
        return Translation({}, f"{key} has no effect: no tools and no interactions are given", inherited=_AS_IN_VERL)
    return Translation(
        {"rollout.agent": "tools"},
        f"{key}: rows without agent_name use the tools; verl 0.9 does so with {_AGENT}=tool_agent only",
        inherited=_AS_IN_VERL,
    )


def agent_loop(key: str, value: Value, given: Given) -> Translation:
    if word(value) not in _AGENTS:
        raise ConfigError(
            f"{key}={value} is not supported here: there are no agent loops of your own",
            hint=f"supported: {', '.join(_AGENTS)}; or set rollout.environment to a class that answers the policy",
        )
    translation = mapped(_AGENTS, "rollout.agent")(key, value, given)
    return Translation(translation.settings, inherited=_AS_IN_VERL)


def named_file(ours: str) -> Rule:
    def rule(_key: str, value: Value, _given: Given) -> Translation:
        return Translation({} if word(value) == "null" else {ours: value}, inherited=_AS_IN_VERL)

    return rule


def users_file(_key: str, value: Value, given: Given) -> Translation:
    """In verl, a simulated user that raises ends the run. A limit of time is ours, and so is what follows from it."""
    if word(value) == "null":
        return Translation({}, inherited=_AS_IN_VERL)
    limited = "rollout.environment_timeout" in given
    failures: dict[str, Value] = {} if limited else {"rollout.max_failed_share": 0.0}
    return Translation({"rollout.interactions_file": value}, inherited={**_AS_IN_VERL, **failures})


def turns(key: str, value: Value, given: Given) -> Translation:
    """The policy may speak once more than it is answered."""
    limits = []
    for name, further in (("max_assistant_turns", 0), ("max_turns", 0), ("max_user_turns", 1)):
        limit = given.get(f"{_TURNS}.{name}")
        if limit is None or word(limit) == "null":
            continue
        count = whole(limit)
        if count is None:
            raise ConfigError(f"{key}={value}: expected a whole number", hint="null: no limit")
        if count > 0:  # verl takes 0 for no limit
            limits.append(count + further)
    return Translation({"rollout.max_turns": min(limits) if limits else None})


_AGENTS = {"single_turn_agent": "single_turn", "tool_agent": "tools"}
_OWN_LOOPS = "set rollout.environment to a class that answers the policy's turns"

RULES: dict[str, Rule] = {
    f"{_TURNS}.enable": multi_turn,
    f"{_TURNS}.tool_config_path": named_file("data.tools_file"),
    f"{_TURNS}.function_tool_path": refused("write the tools as classes, and name them in tool_config_path"),
    f"{_TURNS}.interaction_config_path": users_file,
    f"{_TURNS}.max_assistant_turns": turns,
    f"{_TURNS}.max_turns": turns,
    f"{_TURNS}.max_user_turns": turns,
    f"{_TURNS}.max_parallel_calls": to("rollout.tools.max_parallel_calls"),
    f"{_TURNS}.max_tool_response_length": to("rollout.tools.max_response_length"),
    f"{_TURNS}.tool_response_truncate_side": to("rollout.tools.truncate_side"),
    f"{_TURNS}.format": to("rollout.tools.format"),
    f"{_TURNS}.use_inference_chat_template": only("false"),
    f"{_TURNS}.tokenization_sanity_check_mode": no_effect("sampled tokens are never tokenised again"),
    f"{_TURNS}.num_repeat_rollouts": no_effect("verl does not read it; see rollout.samples_per_prompt"),
    f"{_TURNS}.completion_callback": refused(_OWN_LOOPS),
    f"{ROLLOUT}.agent.default_agent_loop": agent_loop,
    f"{ROLLOUT}.agent.num_workers": no_effect("tools run in threads beside the controller"),
    f"{ROLLOUT}.agent.agent_loop_config_path": refused(_OWN_LOOPS),
    f"{ROLLOUT}.agent.agent_loop_manager_class": refused(_OWN_LOOPS),
    f"{ROLLOUT}.agent.custom_async_server.path": refused("the engine is chosen by rollout.engine"),
    f"{ROLLOUT}.agent.custom_async_server.name": refused("the engine is chosen by rollout.engine"),
    "data.tool_config_path": named_file("data.tools_file"),
    "data.function_tool_path": refused("write the tools as classes, and name them in tool_config_path"),
    "data.need_tools_kwargs": no_effect("a row's tools get what its extra_info.tools_kwargs holds"),
}
