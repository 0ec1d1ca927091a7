"""Drafted tokens, and when drafting pauses, without an engine."""

from collections.abc import Sequence

import pytest

from trainer.rollout.speculation.drafts import ALLOWANCE, VERIFY, Drafter, Group, Payoff, Row, Text


def text(tokens: Sequence[int], group: Group | None = None, length: int = 8) -> Text:
    found = Text(tokens, group or Group(), most=length)
    while length > 1:
        found.learn(1, 1)
        length //= 2
    return found


def test_a_draft_is_what_followed_the_last_three_tokens() -> None:
    assert text([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 9, 1, 2, 3]).draft() == [4, 5, 6, 7, 8, 9, 10, 11]
    assert text([1, 2, 3, 4, 5, 9, 2, 3]).draft() == []
    assert text([1, 2]).draft() == []


def test_the_last_occurrence_counts() -> None:
    assert text([1, 2, 3, 4, 1, 2, 3, 5, 6, 1, 2, 3], length=1).draft() == [5]


def test_a_repetition_is_continued_beyond_its_end() -> None:
    assert text([9, 7, 7, 7, 7]).draft() == [7] * 8
    assert text([1, 2, 3, 1, 2, 3, 1]).draft() == [2, 3, 1, 2, 3, 1, 2, 3]


def test_answers_to_the_same_prompt_draft_for_each_other() -> None:
    group = Group()
    other = text([1, 2, 3, 40, 41, 42, 43], group)
    own = text([1, 2, 3], group)
    assert own.draft() == [40, 41, 42, 43]
    other.extend([44])
    assert own.draft() == [40, 41, 42, 43, 44]
    assert text([1, 2, 3]).draft() == []


def test_drafts_grow_while_they_are_accepted_and_shrink_to_what_was() -> None:
    own = Text([7] * 5, Group(), most=6)
    lengths = []
    for drafted, accepted in [(0, 0), (1, 1), (2, 2), (4, 4), (6, 6), (6, 3), (3, 0)]:
        own.learn(drafted, accepted)
        lengths.append(len(own.draft()))
    assert lengths == [1, 2, 4, 6, 6, 3, 1]


def row(name: str, prompt: list[int], response: list[int], new: int, drafted: int = 0) -> Row:
    return Row(name, response[len(response) - new :], drafted, lambda: (prompt, response))


def test_a_drafter_follows_responses_from_step_to_step() -> None:
    drafter = Drafter(4)
    assert drafter.draft([row("a", [1, 2, 3], [4], 1), row("b", [1, 2, 3], [5], 1)]) == [[], []]
    # The prompt is the group's, so b's first token is what follows it; the last three tokens of both are new.
    assert drafter.draft([row("a", [1, 2, 3], [4, 5], 1), row("b", [1, 2, 3], [5, 1], 1)]) == [[], []]
    found = drafter.draft([row("b", [1, 2, 3], [5, 1, 2, 3], 2, drafted=1), row("c", [8, 2, 3], [5], 1)])
    assert found == [[5, 1], []]  # c answers another prompt, and b's draft is longer after one was accepted


def test_a_response_that_was_away_is_read_again() -> None:
    drafter = Drafter(4)
    drafter.draft([row("a", [1, 2, 3], [4], 1)])
    drafter.draft([row("b", [6, 6, 6], [6], 1)])
    assert drafter.draft([row("a", [1, 2, 3], [4, 5, 1, 2, 3], 1)]) == [[4]]


def steps_with_drafts(payoff: Payoff, steps: int, responses: int, drafted: int, accepted: int) -> int:
    """The steps of so many that are not paused, when each of them verifies and accepts so many tokens."""
    found = 0
    for _ in range(steps):
        if not payoff.paused(responses):
            found += 1
            payoff.count(responses, drafted, accepted)
    return found


@pytest.mark.parametrize("responses", [1, 8, 512])
def test_drafts_that_are_never_accepted_cost_few_steps(responses: int) -> None:
    steps = 4000
    tried = steps_with_drafts(Payoff(), steps, responses, responses, 0)
    assert tried >= ALLOWANCE / VERIFY
    assert tried * VERIFY < 0.01 * steps


def test_drafts_that_save_more_than_they_cost_are_never_paused() -> None:
    assert steps_with_drafts(Payoff(), 4000, 512, 512, 160) == 4000
    assert steps_with_drafts(Payoff(), 4000, 1, 4, 1) == 4000


def test_a_search_without_finds_ends_too() -> None:
    assert steps_with_drafts(Payoff(), 4000, 64, 0, 0) < 1500


def test_a_pause_ends_with_its_steps_or_when_half_of_the_responses_are_gone() -> None:
    payoff = Payoff()
    steps_with_drafts(payoff, 21, 64, 64, 0)
    assert payoff.paused(64)
    assert payoff.paused(33)
    assert not payoff.paused(32)
    assert steps_with_drafts(payoff, 100, 32, 32, 32) == 100


def test_pauses_grow_while_drafts_do_not_pay_and_are_short_again_after_they_did() -> None:
    payoff = Payoff()

    def pause() -> int:
        while not payoff.paused(8):
            payoff.count(8, 8, 0)
        paused = 1
        while payoff.paused(8):
            paused += 1
        return paused

    assert [pause(), pause(), pause()] == [512, 1024, 2048]
    steps_with_drafts(payoff, 100, 8, 8, 8)
    assert pause() == 512
