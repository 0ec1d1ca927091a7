"""N-gram drafts, and the decision whether they pay, without an engine."""

from collections.abc import Sequence

import pytest

from trainer.rollout.vllm.drafts import (
    ASSUMED_COST,
    FIRST_PAUSE,
    MAX_BACKOFF,
    MAX_PAUSE,
    MIN_COST,
    TIMED_STEPS,
    WINDOW,
    Backoff,
    Drafter,
    Group,
    StepTimes,
    Text,
    Update,
    acceptance_length,
)


def text(tokens: Sequence[int], group: Group | None = None, length: int = 8) -> Text:
    """A text whose next draft has `length` tokens."""
    text = Text(tokens, group or Group(), max_length=length)
    while length > 1:
        text.adapt(1, 1)
        length //= 2
    return text


@pytest.mark.parametrize(
    ("tokens", "length", "draft"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 9, 1, 2, 3], 8, [4, 5, 6, 7, 8, 9, 10, 11]),
        ([1, 2, 3, 4, 5, 9, 2, 3], 8, []),  # the last three tokens are new
        ([1, 2], 8, []),
        ([1, 2, 3, 4, 1, 2, 3, 5, 6, 1, 2, 3], 1, [5]),  # the last occurrence counts
        ([9, 7, 7, 7, 7], 8, [7] * 8),  # continues beyond the end of the text
        ([1, 2, 3, 1, 2, 3, 1], 8, [2, 3, 1, 2, 3, 1, 2, 3]),
    ],
)
def test_a_draft_repeats_what_followed_the_last_three_tokens(tokens: list[int], length: int, draft: list[int]) -> None:
    assert text(tokens, length=length).draft() == draft


def test_responses_to_the_same_prompt_draft_for_each_other() -> None:
    group = Group()
    other = text([1, 2, 3, 40, 41, 42, 43], group)
    response = text([1, 2, 3], group)
    assert response.draft() == [40, 41, 42, 43]
    other.extend([44])
    assert response.draft() == [40, 41, 42, 43, 44]
    assert text([1, 2, 3]).draft() == []


def test_drafts_grow_while_they_are_accepted_and_shrink_otherwise() -> None:
    response = Text([7] * 5, Group(), max_length=6)
    lengths = []
    for drafted, accepted in [(0, 0), (4, 1), (1, 1), (2, 2), (4, 4), (6, 6), (6, 3), (3, 0)]:
        response.adapt(drafted, accepted)
        lengths.append(len(response.draft()))
    assert lengths == [4, 1, 2, 4, 6, 6, 3, 1]


def update(name: str, prompt: list[int], response: list[int], new: int, drafted: int = 0) -> Update:
    return Update(name, response[len(response) - new :], drafted, lambda: (prompt, response))


def test_a_drafter_follows_responses_from_step_to_step() -> None:
    drafter = Drafter(4)
    assert drafter.draft([update("a", [1, 2, 3], [4], 1), update("b", [1, 2, 3], [5], 1)]) == [[], []]
    assert drafter.draft([update("a", [1, 2, 3], [4, 5], 1), update("b", [1, 2, 3], [5, 1], 1)]) == [[], []]
    drafts = drafter.draft([update("b", [1, 2, 3], [5, 1, 2, 3], 2, drafted=1), update("c", [8, 2, 3], [5], 1)])
    assert drafts == [[5, 1, 2, 3], []]  # c answers another prompt


def test_a_response_without_an_update_is_read_again_later() -> None:
    drafter = Drafter(4)
    drafter.draft([update("a", [1, 2, 3], [4], 1)])
    drafter.draft([update("b", [6, 6, 6], [6], 1)])
    assert drafter.draft([update("a", [1, 2, 3], [4, 5, 1, 2, 3], 1)]) == [[4, 5, 1, 2]]


def test_the_acceptance_length_is_estimated_from_the_last_tokens() -> None:
    words = list(range(100, 164))
    assert acceptance_length([(words, words[::-1])], 8) == 1.0
    assert acceptance_length([], 8) == 1.0
    # 32 tokens: the drafts have four tokens and three times eight, and each step has one more.
    assert acceptance_length([(words, [7] * 64)], 8) == 32 / 4
    assert acceptance_length([(words, [7] * 64)], 2) == 32 / 11
    assert acceptance_length([(words, [7] * 64), (words, words[::-1])], 8) == 64 / 36
    assert acceptance_length([(words, words[3:40])], 8) > 3  # it repeats its prompt
    assert acceptance_length([(words[:2], words[3:40]), (words[:2], words[3:40])], 8) > 1.5  # or another response


def times(plain: Sequence[float], drafting: Sequence[float], responses: int = 64) -> StepTimes:
    times = StepTimes()
    for is_drafting, steps in ((False, plain), (True, drafting)):
        for seconds in steps:
            times.add(is_drafting, responses, seconds)
    return times


@pytest.mark.parametrize(
    ("plain", "drafting", "cost"),
    [
        ([2.0] * 3, [5.0] * 3, 2.5),
        ([2.0, 2.0, 90.0], [5.0, 5.0, 0.1], 2.5),  # outliers do not count
        ([2.0] * 3, [1.0] * 3, MIN_COST),
        ([2.0], [9.0] * 100 + [3.0] * TIMED_STEPS, 1.5),  # only the last steps count
        ([], [], ASSUMED_COST),
        ([2.0], [], ASSUMED_COST),
    ],
)
def test_the_cost_of_drafts_is_the_ratio_of_median_times(
    plain: list[float], drafting: list[float], cost: float
) -> None:
    assert times(plain, drafting).cost(64) == cost


def test_the_cost_is_that_of_the_nearest_batch_size() -> None:
    both = times([2.0], [5.0], responses=512)
    assert both.cost(8) == 2.5
    both.add(False, 8, 1.0)
    assert both.cost(8) == 2.5  # no step of eight with drafts was timed
    both.add(True, 8, 4.0)
    assert both.cost(8) == both.cost(9) == both.cost(15) == 4.0
    assert both.cost(600) == 2.5


def backoff(cost: float) -> Backoff:
    backoff = Backoff()
    backoff.times = times([1.0], [cost], responses=8)
    return backoff


def steps_until_due(backoff: Backoff, drafting: bool, tokens: float = 1.0) -> int:
    steps = 0
    while not backoff.is_due(drafting):
        backoff.count(tokens)
        steps += 1
    return steps


def test_the_pause_doubles_while_drafts_are_not_expected_to_pay() -> None:
    drafts = backoff(cost=2.0)
    pauses = []
    for _ in range(7):
        pauses.append(steps_until_due(drafts, drafting=False))
        assert not drafts.will_pay(8, acceptance_length=2.1)  # little more than they cost
        drafts.decide(drafting=False, pays=False)
    assert pauses == [FIRST_PAUSE, 32, 64, 128, MAX_PAUSE, MAX_PAUSE, MAX_PAUSE]
    drafts.reset()
    assert steps_until_due(drafts, drafting=False) == FIRST_PAUSE


def test_drafts_continue_while_the_acceptance_length_clearly_exceeds_their_cost() -> None:
    drafts = backoff(cost=2.0)
    assert drafts.will_pay(8, acceptance_length=5.0)
    drafts.decide(drafting=False, pays=True)
    for tokens, pays in ((2.5, True), (2.3, True), (2.1, False)):
        assert steps_until_due(drafts, drafting=True, tokens=tokens) == WINDOW
        assert drafts.paid(8) == pays
        drafts.decide(drafting=True, pays=pays)


def test_after_drafts_that_did_not_pay_the_pause_doubles_until_they_pay() -> None:
    drafts = backoff(cost=2.0)
    pauses = []
    for _ in range(8):
        pauses.append(steps_until_due(drafts, drafting=False))
        drafts.decide(drafting=False, pays=True)
        steps_until_due(drafts, drafting=True, tokens=1.5)
        assert not drafts.paid(8)
        drafts.decide(drafting=True, pays=False)
    assert pauses == [FIRST_PAUSE, 32, 64, 128, 256, 512, MAX_BACKOFF, MAX_BACKOFF]
    drafts.decide(drafting=True, pays=True)
    assert steps_until_due(drafts, drafting=False) == FIRST_PAUSE
