"""Drafted tokens, without an engine."""

from collections.abc import Sequence

from trainer.rollout.speculation.drafts import Drafter, Group, Row, Text, tokens_a_step


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
    for drafted, accepted in [(0, 0), (4, 1), (1, 1), (2, 2), (4, 4), (6, 6), (6, 3), (3, 0)]:
        own.learn(drafted, accepted)
        lengths.append(len(own.draft()))
    assert lengths == [4, 1, 2, 4, 6, 6, 3, 1]


def row(name: str, prompt: list[int], response: list[int], new: int, drafted: int = 0) -> Row:
    return Row(name, response[len(response) - new :], drafted, lambda: (prompt, response))


def test_a_drafter_follows_responses_from_step_to_step() -> None:
    drafter = Drafter(4)
    assert drafter.draft([row("a", [1, 2, 3], [4], 1), row("b", [1, 2, 3], [5], 1)]) == [[], []]
    # The prompt is the group's, so b's first token is what follows it; the last three tokens of both are new.
    assert drafter.draft([row("a", [1, 2, 3], [4, 5], 1), row("b", [1, 2, 3], [5, 1], 1)]) == [[], []]
    found = drafter.draft([row("b", [1, 2, 3], [5, 1, 2, 3], 2, drafted=1), row("c", [8, 2, 3], [5], 1)])
    assert found == [[5, 1, 2, 3], []]  # c answers another prompt


def test_a_response_that_was_away_is_read_again() -> None:
    drafter = Drafter(4)
    drafter.draft([row("a", [1, 2, 3], [4], 1)])
    drafter.draft([row("b", [6, 6, 6], [6], 1)])
    assert drafter.draft([row("a", [1, 2, 3], [4, 5, 1, 2, 3], 1)]) == [[4, 5, 1, 2]]


def test_how_a_response_could_be_drafted_is_seen_in_its_last_tokens() -> None:
    words = list(range(100, 164))
    assert tokens_a_step([(words, words[::-1])], 8) == 1.0
    assert tokens_a_step([], 8) == 1.0
    # 32 tokens: the drafts have four tokens and three times eight, and each step has one more.
    assert tokens_a_step([(words, [7] * 64)], 8) == 32 / 4
    assert tokens_a_step([(words, [7] * 64)], 2) == 32 / 11
    assert tokens_a_step([(words, [7] * 64), (words, words[::-1])], 8) == 64 / 36
    assert tokens_a_step([(words, words[3:40])], 8) > 3  # it repeats its prompt
    assert tokens_a_step([(words[:2], words[3:40]), (words[:2], words[3:40])], 8) > 1.5  # or another answer to it
