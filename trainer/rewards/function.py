"""The functions that score responses: rules by data source, or the user's own."""

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainer.config.custom_code import check_parameters
from trainer.config.sections.reward import RewardConfig
from trainer.errors import RewardError
from trainer.rewards.answer import Answer
from trainer.rows import RewardRule

Reward = Callable[[Answer], Any]

_RESTART = 10.0  # seconds to replace a process that hangs

SOURCES_HINT = (
    "set reward.sources={SOURCE: RULE}, reward.name=RULE for all rows, or reward.custom_function.path to a function of "
    "your own"
)


def needs_process(settings: RewardConfig, answer: Answer) -> bool:
    """Whether scoring this answer may hang or die, and therefore runs in a process of its own."""
    if settings.custom_function.given:
        return True
    rule = rule_of(settings, answer)
    return rule is not None and rule.may_hang


def time_limit(settings: RewardConfig, answer: Answer) -> float:
    """Seconds after which the score of this answer counts as failed."""
    rule = None if settings.custom_function.given else rule_of(settings, answer)
    return rule.time_limit(**rule.values(settings)) if rule and rule.time_limit else settings.timeout


def longest_scoring(settings: RewardConfig, answers: Sequence[Answer]) -> float:
    """Seconds to score these answers if each of them hangs and a single process scores them all."""
    custom = settings.custom_function.given
    rules = [settings.rule_for(answer.data_source) for answer in answers]
    apart = [answer for answer, rule in zip(answers, rules, strict=True) if custom or (rule and rule.may_hang)]
    return sum(time_limit(settings, answer) + _RESTART for answer in apart)


def rule_of(settings: RewardConfig, answer: Answer) -> RewardRule | None:
    """The rule that scores this answer; None if only the reward model counts and no rule knows the data source.

    Raises RewardError if the rule counts and none knows the data source.
    """
    rule = settings.rule_for(answer.data_source)
    if rule is None and settings.weight != 0:
        raise RewardError(f"no reward rule knows the data source {answer.data_source!r}", hint=SOURCES_HINT)
    return rule


def reward_function(settings: RewardConfig) -> Reward:
    """The user's function if there is one, otherwise the rules.

    The user's function is called as verl does: (data_source, solution_str, ground_truth, extra_info), by name, and with
    `reward.custom_function.kwargs`. A parameter called `response_ids` gets the tokens of the response. Raises
    ConfigError if it cannot be loaded, or called like this.
    """
    custom = settings.custom_function
    if not custom.given:
        return lambda answer: _by_rule(settings, answer)
    function = custom.load()
    with_tokens = _reads_tokens(function)
    named = ["data_source", "solution_str", "ground_truth", "extra_info", *(["response_ids"] if with_tokens else [])]
    check_parameters("reward.custom_function", function, [*named, *custom.kwargs])

    def call(answer: Answer) -> Any:
        tokens = {"response_ids": list(answer.sampled_ids)} if with_tokens else {}
        return _awaited(
            function(
                data_source=answer.data_source,
                solution_str=answer.response,
                ground_truth=answer.ground_truth,
                extra_info=dict(answer.extra_info),
                **tokens,
                **custom.kwargs,
            )
        )

    return call


def batched_function(settings: RewardConfig) -> Callable[[Sequence[Answer]], Sequence[Any]]:
    """The user's function that scores many responses in one call. Raises ConfigError if it cannot be loaded, or
    called like this."""
    custom = settings.custom_function
    function = custom.load()
    named = ["data_sources", "solution_strs", "ground_truths", "extra_infos", *custom.kwargs]
    check_parameters("reward.custom_function", function, named)

    def call(answers: Sequence[Answer]) -> Sequence[Any]:
        scores = _awaited(
            function(
                data_sources=[answer.data_source for answer in answers],
                solution_strs=[answer.response for answer in answers],
                ground_truths=[answer.ground_truth for answer in answers],
                extra_infos=[dict(answer.extra_info) for answer in answers],
                **custom.kwargs,
            )
        )
        if len(scores) != len(answers):
            raise RewardError(
                f"the reward function returned {len(scores)} scores for {len(answers)} responses",
                hint="return a list with one score per response, in their order",
            )
        return list(scores)

    return call


def _reads_tokens(function: Callable[..., Any]) -> bool:
    try:
        return "response_ids" in inspect.signature(function).parameters
    except ValueError:  # a function in C may not tell
        return False


def _by_rule(settings: RewardConfig, answer: Answer) -> Any:
    rule = rule_of(settings, answer)
    if rule is None:
        return 0.0
    returned = rule.score(answer.response, answer.ground_truth, **rule.values(settings))
    if rule.answer is None:
        return returned
    scores = returned if isinstance(returned, Mapping) else {"score": returned}
    return {**scores, "pred": rule.answer(answer.response, **rule.values(settings)) or ""}


def _awaited(returned: Any) -> Any:
    """What the function returned, or what its coroutine returns."""
    return asyncio.run(returned) if inspect.iscoroutine(returned) else returned
