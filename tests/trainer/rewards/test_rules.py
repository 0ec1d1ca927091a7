"""Rules on responses, and the settings that choose them."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.rewards import judged_answers
from trainer.config.overrides import parse_overrides
from trainer.config.sections.reward import RewardConfig
from trainer.data.answers import final_answer
from trainer.errors import ConfigError, RewardError
from trainer.rewards.answer import Answer
from trainer.rewards.function import reward_function
from trainer.rewards.scores import as_scored


def score(name: str, response: str, truth: object, **parameters: object) -> float:
    """The score by a rule, as the settings choose it."""
    answer = Answer(response, truth)
    return as_scored(reward_function(RewardConfig(name=name, **parameters))(answer), answer).value


@pytest.mark.parametrize(("response", "truth", "expected"), judged_answers.GSM8K)
def test_gsm8k_scores_answers_as_judged_by_hand(response: str, truth: str, expected: float) -> None:
    assert score("gsm8k", response, truth) == expected


@pytest.mark.parametrize(("response", "truth", "expected"), judged_answers.GSM8K_FLEXIBLE)
def test_the_flexible_method_takes_the_last_number_anywhere(response: str, truth: str, expected: float) -> None:
    assert score("gsm8k", response, truth, gsm8k_method="flexible") == expected


def test_a_truth_may_be_a_number() -> None:
    assert score("gsm8k", "#### 9", 9) == score("gsm8k", "#### 9.5", 9.5) == 1.0


@given(number=st.integers(-(10**9), 10**9), before=st.text())
def test_any_number_after_the_last_mark_is_found(number: int, before: str) -> None:
    assert score("gsm8k", f"{before}\n#### {number:,}", str(number)) == 1.0


@given(text=st.text() | st.from_regex(r"#### [-+0-9.,/^eExk% ]*", fullmatch=True))
def test_any_text_has_an_answer_or_none(text: str) -> None:
    answer = final_answer(text)
    assert answer is None or final_answer(f"#### {answer}") == answer


@pytest.mark.parametrize(("answer", "truth", "expected"), judged_answers.MATH)
def test_math_scores_answers_as_judged_by_hand(answer: str, truth: str, expected: float) -> None:
    assert score("math", f"so \\boxed{{{answer}}}", truth) == expected


@pytest.mark.parametrize(
    ("response", "truth", "expected"),
    [
        (r"\boxed{3} no, \boxed{4}", "4", 1.0),
        (r"\boxed{3} no, \boxed{4}", "3", 0.0),
        (r"\boxed{5", "5", 0.0),
        (r"$\boxed 5$ apples", "5", 1.0),
        (r"\boxed \frac{1}{2}", "1/2", 1.0),
        (r"\boxed {5} or 6", "5", 1.0),
        (r"\boxed 5 and \boxed{6}", "6", 1.0),
        (r"\boxed ", "5", 0.0),
        ("5", "5", 0.0),
        (r"\fbox{5}", "5", 1.0),
        (r"\boxed{7}", ["6", 7], 1.0),
        (r"\boxed{7}", r"thus \boxed{7}", 1.0),
        (r"\boxed{June 3, 2 pm}", "June 3,2 pm", 1.0),
    ],
)
def test_math_reads_the_last_boxed_answer(response: str, truth: object, expected: float) -> None:
    assert score("math", response, truth) == expected


@pytest.mark.parametrize(
    ("response", "truth", "expected"),
    [
        ("Answer: 34", "34", 1.0),
        ("answer : $1,034$", "1034", 1.0),
        ("Answer: 3\nAnswer: 4", "4", 1.0),
        (r"Answer: \frac12", r"\frac{1}{2}", 1.0),
        ("Answer: x = 5 dollars", "5", 1.0),
        (r"it is \boxed{34}", "34", 1.0),
        (r"it is \boxed{34.0}", "34", -1.0),
        ("34", "34", -1.0),
        ("Answer: 34" + " " * 300, "34", -1.0),
        (r"\boxed{34}" + " " * 100, "34", -1.0),
    ],
)
def test_dapo_gives_one_or_minus_one(response: str, truth: object, expected: float) -> None:
    assert score("dapo", response, truth) == expected


@pytest.mark.parametrize(("response", "truth", "expected"), judged_answers.DAPO)
def test_dapo_scores_answers_as_judged_by_hand(response: str, truth: str, expected: float) -> None:
    assert score("dapo", response, truth) == 2 * expected - 1


def test_dapo_reports_its_accuracy() -> None:
    answer = Answer("Answer: 3", 3, "aime2025")
    assert as_scored(reward_function(RewardConfig())(answer), answer).info == {"acc": 1.0}


@pytest.mark.parametrize(
    ("response", "truth", "expected"),
    [
        ("C", "C", 1.0),
        ("(C) because", "C", 1.0),
        ("I think the answer is **C**.", "C", 1.0),
        ("The answer is B. No, the correct answer is (C)", "C", 1.0),
        ("**Answer:** C", "C", 1.0),
        (r"\boxed{\text{C}}", "C", 1.0),
        ("<answer> C) Paris </answer>", "C", 1.0),
        ("Answer: C", 2, 1.0),
        ("Answer: 3", "3", 1.0),
        ("The answer is B. Option A ignores friction.", "B", 1.0),
        ("Answer: B\n\nChoice A is too small.", "B", 1.0),
        ("The correct answer is option B", "B", 1.0),
        ("Answer: **Choice (B)**", "B", 1.0),
        ("the correct choice is **D) all of them**", "D", 1.0),
        ("My choice: D", "D", 1.0),
        ("The answer is $B$.", "B", 1.0),
        (r"The answer is \(B\).", "B", 1.0),
        (r"Answer: \text{B}", "B", 1.0),
        (r"\boxed{\textbf{(B) all}}", "B", 1.0),
        (r"\boxed{\mathrm{B}}", "B", 1.0),
        (r"\boxed{$B$}", "B", 1.0),
        ("Option A ignores friction.", "A", 0.0),
        ("the answer is a cat", "A", 0.0),
        ("Can it be?", "C", 0.0),
        ("Answer: D", "C", 0.0),
        ("", "C", 0.0),
    ],
)
def test_multiple_choice_reads_the_chosen_label(response: str, truth: object, expected: float) -> None:
    assert score("multiple_choice", response, truth) == expected


@pytest.mark.parametrize(("response", "truth", "expected"), judged_answers.MULTIPLE_CHOICE)
def test_multiple_choice_scores_answers_as_judged_by_hand(response: str, truth: object, expected: float) -> None:
    assert score("multiple_choice", response, truth) == expected


@pytest.mark.parametrize(
    ("response", "truth", "exact", "f1"),
    [
        ("<answer>The Beatles!</answer>", {"target": ["Beatles", "Queen"]}, 1.0, 1.0),
        ("<answer>x</answer> <answer>a queen</answer>", {"target": "Queen"}, 1.0, 1.0),
        ("<answer>Paul McCartney</answer>", ["Sir Paul McCartney"], 0.0, 0.8),
        ("no tags: Queen", "Queen", 0.0, 0.5),
        ("<answer>42</answer>", 42, 1.0, 1.0),
        ("<answer>Queen</answer>" * 11, "Queen", 0.25, 1.0),
    ],
)
def test_answers_to_questions_are_compared_as_squad_does(response: str, truth: object, exact: float, f1: float) -> None:
    assert (score("qa_em", response, truth), score("qa_f1", response, truth)) == (exact, pytest.approx(f1))


def test_a_rule_for_text_refuses_a_structured_truth() -> None:
    with pytest.raises(RewardError, match=r"ground truth that is text or a number, not \{'a': 1\}"):
        score("exact_match", "1", {"a": 1})


def test_exact_match_ignores_space_at_the_ends_only() -> None:
    assert score("exact_match", " a b\n", "a b") == 1.0
    assert score("exact_match", "a  b", "a b") == 0.0


@pytest.mark.parametrize(
    ("pattern", "response", "expected"),
    [
        (r"\d+", "first 3, then 4", 1.0),
        (r"answer: (\d+)", "answer: 4, 5", 1.0),
        (r"answer: (\d+)", "answer: 4, answer: 5", 0.0),
        (r"(a)|4", "4", 0.0),
        (r"\d+", "none", 0.0),
    ],
)
def test_a_regular_expression_finds_the_answer(pattern: str, response: str, expected: float) -> None:
    assert score("regex", response, "4", pattern=pattern) == expected


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (["reward.name=gsm"], "reward.name=gsm: expected auto | code | dapo | exact_match", "did you mean gsm8k?"),
        (["reward.name=regex"], "the reward rule regex needs reward.pattern", ""),
        (["reward.sources={mine: regex}"], "the reward rule regex needs reward.pattern", ""),
        (["reward.pattern=x"], "reward.pattern belongs to reward.name=regex, not to auto", ""),
        (["reward.sources={mine: mathh}"], "reward.sources={mine: mathh}: expected mapping", "rules of data sources"),
        (["reward.name=math", "reward.sources={mine: math}"], "reward.sources belongs to reward.name=auto", ""),
        (["reward.name=regex", "reward.pattern=("], "reward.pattern=(: expected regular expression", "Python's syntax"),
        (["trainer.loggers=[wand]"], "expected list of mlflow | swanlab | trackio | wandb", "did you mean wandb?"),
    ],
)
def test_a_wrong_name_or_parameter_is_refused(arguments: list[str], message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_overrides(arguments)
    assert message in str(caught.value)
    assert hint in caught.value.hint


def test_a_parameter_survives_pickling_and_yaml() -> None:
    settings = RewardConfig(name="regex", pattern=r"\d+")
    assert pickle.loads(pickle.dumps(settings)) == settings
    assert RewardConfig.model_validate_json(settings.model_dump_json()) == settings
