"""The last boxed answer must be mathematically equal to the ground truth."""

import re
from functools import lru_cache
from math import floor, log10
from typing import Any

from trainer.data.latex import last_boxed, plain_latex
from trainer.errors import ConfigError
from trainer.rewards.truth import as_texts
from trainer.rows import RewardRule

# What Math-Verify does not compare: bases of numbers, and units.
_KINDS = (
    re.compile(r"\d_\{?(\d+)\}?"),
    re.compile(r"\b(?:(inch)(?:es)?|(f)(?:oo|ee)t|(yard|mile|hour|minute|second|day|week)s?)\b"),
)
_DECIMALS = 6
_COMPOUND = re.compile(r"[a-zA-Z)}\d]\s*[-+*/^]|\d\s*[a-zA-Z]")  # more than one variable


def math(response: str, ground_truth: object) -> float:
    """1.0 if the content of the last `\\boxed{...}` equals the ground truth, or one of a list of truths.

    `0.5`, `\\frac12` and `1/2` are equal, and so are `12` and `12\\%`, as in MATH's evaluation. Answers that differ
    in more than such spelling are compared by Math-Verify; decimals count if they agree in six places.
    """
    answer = last_boxed(response)
    if answer is None:
        return 0.0
    truths = [last_boxed(truth) or truth for truth in as_texts(ground_truth)]
    return float(any(_same(answer, truth) for truth in truths))


def _same(answer: str, truth: str) -> bool:
    if any(_differ(pattern, answer, truth) for pattern in _KINDS):
        return False
    plain_answer, plain_truth = plain_latex(answer), plain_latex(truth)
    pairs = [(answer, truth), (plain_answer, plain_truth)]
    if any("".join(spelling.split()) == "".join(other.split()) for spelling, other in pairs):
        return True
    left, equation, _ = plain_truth.partition("=")
    if equation and "=" not in answer and re.search("[a-zA-Z]", left) and _COMPOUND.search(left):
        return False  # Math-Verify would compare what stands behind the sign
    if ("%" in answer) != ("%" in truth):
        pairs.append((_hundredths(answer), _hundredths(truth)))
    return any(_equal(spelling, other) for spelling, other in pairs)


def _hundredths(text: str) -> str:
    """The text with the value of its percent sign."""
    return f"\\frac{{1}}{{100}} \\cdot ({plain_latex(text)})" if "%" in text else text


def _differ(pattern: re.Pattern[str], answer: str, truth: str) -> bool:
    """Whether both texts have matches of a pattern that differ."""
    matched = [{"".join(match) for match in pattern.findall(text)} for text in (answer, truth)]
    return all(matched) and matched[0] != matched[1]


def _equal(answer: str, truth: str) -> bool:
    _, verify = _math_verify()
    # No time limits of the library's own: they are signals. `reward.timeout` ends this process.
    decimals = _decimals(_parsed(truth))
    return bool(verify(_parsed(truth), _parsed(answer), float_rounding=decimals, timeout_seconds=None))


def _decimals(truth: Any) -> int:
    """The decimals in which a number must agree with the truth: six, behind the leading zeros of a small one."""
    sizes = [
        abs(float(part)) for part in truth if getattr(part, "is_Rational", False) or getattr(part, "is_Float", False)
    ]
    return max((_DECIMALS + floor(-log10(size)) for size in sizes if 0 < size < 1), default=_DECIMALS)


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
        *("numina_cn_k12", "numina_olympiads", "slipway/synthetic-math"),
    ),
    may_hang=True,  # an expression may take for ever to simplify
    check=_check,
)
