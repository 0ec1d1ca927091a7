"""Padding, sharding and trimming a batch neither lose nor reorder tokens."""

import pickle

import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.batches.batch import Batch
from trainer.models.packing import PackedRows

tokens = st.lists(st.integers(1, 99), min_size=1, max_size=6)


def make(rows: list[tuple[list[int], list[int]]]) -> Batch:
    responses = [response for _, response in rows]
    return Batch.from_responses([prompt for prompt, _ in rows], responses, [[-0.5] * len(r) for r in responses])


def contents(batch: Batch) -> list[tuple[list[int], list[int]]]:
    rows = []
    for row in range(len(batch)):
        prompt, length = int(batch.prompt_lengths[row]), int(batch.lengths[row])
        ids = batch.token_ids[row].tolist()
        assert set(ids[length:]) <= {0}
        rows.append((ids[:prompt], ids[prompt:length]))
    return rows


@given(st.lists(st.tuples(tokens, tokens), min_size=1, max_size=8))
def test_a_batch_preserves_its_rows(rows: list[tuple[list[int], list[int]]]) -> None:
    batch = make(rows)
    assert contents(batch) == rows
    sizes = [min(2, len(rows)), 0, len(rows) - min(2, len(rows))]
    parts = list(batch.split(sizes))
    assert [len(part) for part in parts] == sizes
    assert [row for part in parts for row in contents(part)] == rows
    assert torch.equal(batch.response_mask, batch.rollout_log_probs != 0)


@given(st.lists(st.tuples(tokens, tokens), min_size=1, max_size=9), st.integers(1, 4), st.integers(1, 9))
def test_shards_hold_each_data_groups_rows_of_each_mini_batch(
    rows: list[tuple[list[int], list[int]]], groups: int, size: int
) -> None:
    shards = make(rows).shards(groups, mini_batch_size=size)
    assert len(shards) == groups
    parts = [shard.rows.split(shard.sizes) for shard in shards]
    for number, of_groups in enumerate(zip(*parts, strict=True)):
        held = range(number * size, min((number + 1) * size, len(rows)))
        assert sorted(torch.cat(of_groups).tolist()) == list(held)
        if len(held) % groups == 0:
            assert {len(part) for part in of_groups} == {len(held) // groups}


def test_groups_without_a_row_get_none() -> None:
    shards = make([([1], [2]), ([3], [4, 5])]).shards(4)
    assert [shard.rows.tolist() for shard in shards] == [[0], [1], [], []]
    assert [shard.sizes for shard in shards] == [[1], [1], [0], [0]]


def test_the_rows_of_a_group_without_any_and_its_masked_row_can_be_sent_and_packed() -> None:
    batch = make([([1, 2], [3]), ([4], [5, 6])])
    none = pickle.loads(pickle.dumps(batch.rows(torch.tensor([], dtype=torch.int64))))
    assert len(none) == 0
    assert none.response_mask.shape == (0, 2)
    masked = none.masked_row()
    assert masked.lengths.tolist() == [1]
    assert masked.tensors().keys() == batch.tensors().keys()
    packed = PackedRows.of(masked, multiple=4, share_prompts=True)
    assert packed.token_ids.shape == (1, 4)
    assert packed.unpack(torch.ones(0)).tolist() == [[0.0, 0.0]]


def test_shards_have_nearly_equally_many_tokens() -> None:
    batch = make([([1] * length, [2]) for length in (90, 80, 70, 20, 10, 5)])
    sums = [int(batch.lengths[shard.rows].sum()) for shard in batch.shards(3)]
    assert max(sums) - min(sums) <= 5


def test_columns_of_padding_are_trimmed() -> None:
    batch = make([([1, 2], [3]), ([1, 2, 3, 4], [5, 6])])
    assert batch.token_ids.shape == (2, 6)
    assert batch.rows(slice(0, 1)).token_ids.shape == (1, 3)
    assert batch.rows(slice(0, 1)).response_mask.shape == (1, 2)


@given(st.lists(st.tuples(tokens, tokens), min_size=1, max_size=8), st.booleans())
def test_a_pickled_batch_is_sent_as_arrays_and_is_writable_after_arrival(
    rows: list[tuple[list[int], list[int]]], cut: bool
) -> None:
    batch = make([([1] * 9, [2]), *rows])
    batch = batch.rows(slice(1, None)) if cut else batch  # rows that are not contiguous in memory
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
    arrived = pickle.loads(data, buffers=[memoryview(buffer).toreadonly() for buffer in buffers])
    assert contents(arrived) == contents(batch)
    assert arrived.values is None
    for name in ("token_ids", "prompt_lengths", "response_mask", "rollout_log_probs"):
        assert torch.equal(getattr(arrived, name), getattr(batch, name))
        getattr(arrived, name).zero_()
    assert contents(batch)[-1] == rows[-1]


def test_with_only_drops_all_other_tensors() -> None:
    batch = make([([1], [2, 3]), ([4, 5], [6])]).with_(values=torch.ones(2, 2))
    sent = batch.with_only("values", "returns")
    assert contents(sent) == contents(batch)
    assert sent.values is batch.values
    assert sent.rollout_log_probs is None
    assert sent.returns is None


def test_tensors_added_by_a_phase_are_selected_with_the_rows() -> None:
    batch = make([([1], [2]), ([3], [4])]).with_(values=torch.tensor([[1.0], [2.0]]))
    assert batch.rows(torch.tensor([1])).values.tolist() == [[2.0]]
    assert batch.returns is None


def test_without_a_gpu_nothing_is_pinned_or_copied() -> None:
    """Pinning memory without a GPU driver raises an error."""
    batch = make([([5, 6], [7]), ([8], [9, 10])])
    packed, cpu = PackedRows.of(batch), torch.device("cpu")
    for rows, moved in ((batch, batch.to(cpu)), (packed, packed.to(cpu))):
        for name, value in vars(rows).items():
            assert getattr(moved, name) is value
            assert not (isinstance(value, torch.Tensor) and value.is_pinned())
