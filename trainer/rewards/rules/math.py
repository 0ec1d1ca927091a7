"""The last boxed answer must be mathematically equal to the ground truth."""

from functools import lru_cache
from typing import Any

from trainer.errors import ConfigError
from trainer.rewards.latex import last_boxed
from trainer.rewards.truth import as_texts
from trainer.rows import RewardRule


def math(response: str, ground_truth: object) -> float:
    """1.0 if the content of the last `\\boxed{...}` equals the ground truth, or one of a list of truths.

    `0.5`, `\\frac12` and `1/2` are equal. Answers whose texts differ in more than spaces are compared by Math-Verify.
    """
    answer = last_boxed(response)
    if answer is None:
        return 0.0
    truths = [last_boxed(truth) or truth for truth in as_texts(ground_truth)]
    return float(any(_without_spaces(answer) == _without_spaces(truth) or _equal(answer, truth) for truth in truths))


def _without_spaces(text: str) -> str:
    return "".join(text.split())


def _equal(answer: str, truth: str) -> bool:
    _, verify = _math_verify()
    # No time limits of the library's own: they are signals. `reward.timeout` ends this process.
    return bool(verify(_parsed(truth), _parsed(answer), timeout_seconds=None))


@lru_cache(maxsize=4096)  # the responses to a prompt share its truth, and often an answer
def _parsed(text: str) -> Any:
    parse, _ = _math_verify()
    return parse(f"\\boxed{{{text}}}", parsing_timeout=None)


def _math_verify() -> tuple[Any, Any]:
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise ConfigError(
            f"the reward rule math needs the package math-verify: {error}",
            hint="use an image that contains it, or score with reward.custom_function.path",
        ) from error
    return parse, verify


def _check() -> str:
    _math_verify()
    return ""


ROW = RewardRule(
    name="math",
    score=math,
    answer=last_boxed,
    sources=(
        *("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"),
        *("numina_aops_forum", "numina_synthetic_math", "numina_amc_aime", "numina_synthetic_amc"),
        *("numina_cn_k12", "numina_olympiads"),
    ),
    may_hang=True,  # an expression may take for ever to simplify
    check=_check,
)
