"""Partitions of rows are complete, balanced and within their limits."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from trainer.data.batches.partition import MicroBatchLimit, balanced

lengths = st.lists(st.integers(1, 1000), min_size=1, max_size=60)


@given(lengths, st.data())
def test_every_row_is_in_one_part_and_no_part_is_empty(lengths: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(lengths)))
    parts = balanced(lengths, count)
    assert len(parts) == count
    assert all(parts)
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))


@given(lengths, st.data())
def test_parts_differ_by_at_most_the_longest_row(lengths: list[int], data: st.DataObject) -> None:
    sums = [sum(lengths[row] for row in part) for part in balanced(lengths, data.draw(st.integers(1, len(lengths))))]
    assert max(sums) - min(sums) <= max(lengths)


@given(st.integers(1, 4), st.integers(1, 12), st.data())
def test_parts_of_equal_size_have_equally_many_rows(count: int, size: int, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 1000), min_size=count * size, max_size=count * size))
    parts = balanced(lengths, count, equal_size=True)
    assert [len(part) for part in parts] == [size] * count
    sums = [sum(lengths[row] for row in part) for part in parts]
    assert max(sums) - min(sums) <= max(lengths)


def test_differencing_balances_better_than_round_robin() -> None:
    lengths = [900, 800, 700, 600, 500, 400, 300, 200, 100, 50]

    def spread(parts: list[list[int]]) -> int:
        sums = [sum(lengths[row] for row in part) for part in parts]
        return max(sums) - min(sums)

    assert spread(balanced(lengths, 3)) < spread([list(range(first, 10, 3)) for first in range(3)]) / 4


@given(lengths, st.integers(1, 3000))
@example([5, 4, 10, 5], 8)
def test_a_limit_of_tokens_is_kept_unless_a_single_row_is_longer(lengths: list[int], tokens: int) -> None:
    limit = MicroBatchLimit(rows=1, tokens=tokens)
    for part in limit.split(lengths, limit.parts_needed(lengths)):
        assert len(part) == 1 or sum(lengths[row] for row in part) <= tokens


@given(lengths, st.integers(1, 70))
def test_a_limit_of_rows_gives_consecutive_parts(lengths: list[int], rows: int) -> None:
    limit = MicroBatchLimit(rows)
    parts = limit.split(lengths, limit.parts_needed(lengths))
    assert [row for part in parts for row in part] == list(range(len(lengths)))
    assert max(map(len, parts)) <= rows
    assert len(parts) == limit.parts_needed(lengths)


def test_impossible_splits_are_refused() -> None:
    with pytest.raises(ValueError, match="3 rows cannot be split into 4 parts"):
        balanced([1, 2, 3], 4)
    with pytest.raises(ValueError, match="3 rows cannot be split into 2 parts"):
        balanced([1, 2, 3], 2, equal_size=True)


@given(lengths, st.integers(1, 5000), st.booleans())
def test_a_lowered_limit_makes_smaller_parts_down_to_one_row(rows: list[int], value: int, by_rows: bool) -> None:
    limit = MicroBatchLimit(value) if by_rows else MicroBatchLimit(1, value)

    def largest(of: MicroBatchLimit) -> int:
        parts = of.split(rows, of.parts_needed(rows))
        return max(len(part) if by_rows else sum(rows[row] for row in part) for part in parts)

    lower = limit.lowered(rows, sum(rows))
    if lower is None:
        assert largest(limit) == (1 if by_rows else max(rows))
    else:
        assert lower.setting == limit.setting == ("micro_batch_size" if by_rows else "micro_batch_tokens")
        assert lower.value < limit.value
        assert largest(lower) <= max(lower.value, 1 if by_rows else max(rows))
        assert largest(lower) <= largest(limit)


def test_lowering_starts_from_what_a_pass_really_holds() -> None:
    assert MicroBatchLimit(64).lowered([10] * 6, 60) == MicroBatchLimit(3)
    assert MicroBatchLimit(64, 1_000_000).lowered([10] * 6, 60) == MicroBatchLimit(64, 30)
    assert MicroBatchLimit(64, 1_000_000).lowered([10] * 6, 40) == MicroBatchLimit(64, 20)  # they share prompts
    assert MicroBatchLimit(64, 50).lowered([10, 40], 50) == MicroBatchLimit(64, 40)
    assert MicroBatchLimit(64, 40).lowered([10, 40], 50) is None


@given(lengths, st.integers(1, 3000), st.integers(1, 8))
def test_a_limit_of_ranks_that_compute_rows_together_is_the_sum_of_theirs(
    rows: list[int], tokens: int, ranks: int
) -> None:
    of_ranks = MicroBatchLimit(4, tokens).of_ranks(ranks)
    assert of_ranks == MicroBatchLimit(4, tokens * ranks)
    assert of_ranks.of_each(ranks) == MicroBatchLimit(4, tokens)
    assert MicroBatchLimit(4).of_ranks(ranks) == MicroBatchLimit(4)
    assert MicroBatchLimit(4, max(rows)).of_each(ranks).of_ranks(ranks).value >= max(rows)
