"""Rows with one prompt stay together, and no row is lost."""

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.batches.batch import Batch
from trainer.data.batches.shared_prompts import SharedPrompts, halved
from trainer.models.packing import PackedRows

sizes = st.lists(st.integers(1, 9), min_size=1, max_size=8)


def drawn(sizes: list[int], data: st.DataObject) -> SharedPrompts:
    """Groups of these sizes, with lengths of any kind."""
    numbers = iter(range(sum(sizes)))
    groups = [[next(numbers) for _ in range(size)] for size in sizes]
    lengths, prompt_lengths = [0] * sum(sizes), [0] * sum(sizes)
    for group in groups:
        prompt = data.draw(st.integers(1, 50))
        for row in group:
            prompt_lengths[row], lengths[row] = prompt, prompt + data.draw(st.integers(1, 50))
    return SharedPrompts(groups, lengths, prompt_lengths)


@given(sizes, st.integers(1, 300), st.data())
def test_divided_groups_keep_the_limit_unless_a_single_row_is_longer(
    sizes: list[int], tokens: int, data: st.DataObject
) -> None:
    prompts = drawn(sizes, data)
    parts = prompts.within(tokens)
    assert [row for part in parts for row in part] == list(range(sum(sizes)))
    assert all(len(part) == 1 or prompts.cost(part) <= tokens for part in parts)


def test_the_prompt_of_a_group_costs_its_tokens_once() -> None:
    prompts = SharedPrompts([[0, 1, 2], [3]], lengths=[12, 13, 14, 7], prompt_lengths=[10, 10, 10, 5])
    assert prompts.cost([0, 1, 2]) == 10 + 2 + 3 + 4
    assert prompts.cost([3]) == 7
    assert prompts.within(19) == [[0, 1, 2], [3]]
    assert prompts.within(18) == [[0, 1], [2], [3]]


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 5), st.data())
def test_ranks_get_equally_many_rows(ranks: int, groups_of_a_rank: int, size: int, data: st.DataObject) -> None:
    prompts = drawn([size] * (ranks * groups_of_a_rank), data)
    shards = prompts.shards(ranks)
    assert sorted(row for shard in shards for row in shard) == list(range(len(prompts.lengths)))
    assert {len(shard) for shard in shards} == {groups_of_a_rank * size}


@given(sizes, st.integers(1, 6), st.data())
def test_rows_that_do_not_divide_are_spread_without_loss(sizes: list[int], ranks: int, data: st.DataObject) -> None:
    prompts = drawn(sizes, data)
    shards = prompts.shards(ranks)
    assert len(shards) == ranks
    assert sorted(row for shard in shards for row in shard) == list(range(sum(sizes)))


def test_without_shared_prompts_ranks_differ_by_at_most_one_row() -> None:
    prompts = SharedPrompts([[row] for row in range(11)], lengths=range(10, 21), prompt_lengths=[1] * 11)
    assert sorted(map(len, prompts.shards(4))) == [2, 3, 3, 3]


def test_ranks_get_whole_groups_if_their_responses_are_alike() -> None:
    groups = [list(range(start, start + 4)) for start in range(0, 16, 4)]
    shards = SharedPrompts(groups, lengths=[30] * 16, prompt_lengths=[20] * 16).shards(2)
    assert all(sum(row in shard for shard in shards) == 1 for row in range(16))
    assert all(set(group) <= set(shards[0]) or set(group) <= set(shards[1]) for group in groups)


def test_ranks_divide_groups_if_one_of_them_is_far_longer() -> None:
    lengths = [1020] * 4 + [30] * 12
    groups = [list(range(start, start + 4)) for start in range(0, 16, 4)]
    shards = SharedPrompts(groups, lengths, prompt_lengths=[20] * 16).shards(2)
    assert [sum(row < 4 for row in shard) for shard in shards] == [2, 2]


@given(sizes, st.data())
def test_groups_are_halved_until_there_are_enough(sizes: list[int], data: st.DataObject) -> None:
    groups = drawn(sizes, data).groups
    count = data.draw(st.integers(1, sum(sizes)))
    parts = halved(groups, count)
    assert len(parts) == max(count, len(groups))
    assert sorted(row for group in parts for row in group) == list(range(sum(sizes)))
    assert all(parts)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 6)), min_size=1, max_size=8), st.sampled_from([1, 8]))
def test_each_row_of_a_line_sees_its_prompt_and_its_response(rows: list[tuple[int, int]], multiple: int) -> None:
    prompts = [[1, 2, 3], [1, 2], [7]]
    responses = [[10 * (number + 1) + place for place in range(length)] for number, (_, length) in enumerate(rows)]
    batch = Batch.from_responses([prompts[which] for which, _ in rows], responses, None)
    packed = PackedRows.of(batch, multiple, share_prompts=True)
    assert packed.visible is not None
    assert packed.among_visible is not None
    line = packed.token_ids.squeeze(0)
    held = sum(map(len, responses)) + sum(len(prompts[which]) for which in {which for which, _ in rows})
    assert len(line) == -(-held // multiple) * multiple
    bounds = packed.visible_offsets.tolist()
    seen = [line[packed.visible[start:end]].tolist() for start, end in pairwise(bounds)]
    wanted = [prompts[which] + response for (which, _), response in zip(rows, responses, strict=True)]
    assert sorted(seen[: len(rows)]) == sorted(wanted)
    assert all(set(row) == {0} for row in seen[len(rows) :])
    # A row's own tokens are the last that it sees.
    sizes_of_rows = packed.offsets.diff().tolist()
    for start, end, size in zip(bounds[:-1], bounds[1:], sizes_of_rows, strict=True):
        positions = packed.positions.squeeze(0)[packed.visible[start:end]]
        assert positions.tolist() == list(range(end - start))
        assert size <= end - start
    assert torch.equal(packed.visible[packed.among_visible], torch.arange(len(line)))
    assert line[packed.predicting].tolist() == [
        token
        for (which, _), response in zip(rows, responses, strict=True)
        for token in [prompts[which][-1], *response[:-1]]
    ]
