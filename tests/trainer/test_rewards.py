import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.errors import ConfigError
from trainer.rewards import final_answer, reward_function


@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [
        ("5+4=9\n#### 9", "9", 1.0),
        ("#### 1,000", "1000", 1.0),
        ("#### -7", "-7", 1.0),
        ("#### 3 no, #### 4", "4", 1.0),
        ("#### 12", "1", 0.0),
        ("the answer is 9", "9", 0.0),
        ("####", "9", 0.0),
        ("", "9", 0.0),
    ],
)
def test_gsm8k(response: str, truth: str, score: float) -> None:
    assert reward_function("gsm8k")(response, truth) == score


@given(number=st.integers(-(10**9), 10**9), before=st.text())
def test_any_number_after_the_last_mark_is_found(number: int, before: str) -> None:
    assert reward_function("gsm8k")(f"{before}\n#### {number:,}", str(number)) == 1.0


@given(text=st.text())
def test_any_text_has_an_answer_or_none(text: str) -> None:
    answer = final_answer(text)
    assert answer is None or answer in text


def test_exact_match_ignores_space_at_the_ends_only() -> None:
    score = reward_function("exact_match")
    assert score(" a b\n", "a b") == 1.0
    assert score("a  b", "a b") == 0.0


def test_an_unknown_rule_lists_the_known() -> None:
    with pytest.raises(ConfigError) as caught:
        reward_function("gsm8")
    assert "gsm8k" in caught.value.hint
