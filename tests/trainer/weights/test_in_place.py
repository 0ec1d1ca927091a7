"""Loading weights in place on CPU: the first load records the copies, later loads repeat them."""

import json
import subprocess
import sys
from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.trainer.training.ranks import environment
from trainer.errors import ConfigError, WorkerError
from trainer.weights import in_place
from trainer.weights.buckets import Bucket, pack
from trainer.weights.in_place import InPlaceLoader, check_layout, derive_weights, record
from trainer.weights.slices import in_slices, joined

PROGRAM = Path(__file__).with_name("loader_program.py")


class Fused(nn.Module):
    """Joins q and k in one weight, as engines do, and keeps `bias` separate. Counts the calls of its loader."""

    def __init__(self, q: int = 8, k: int = 4, width: int = 12) -> None:
        super().__init__()
        self.parts = {"q": (0, q), "k": (q, k)}
        self.qk = nn.Parameter(torch.zeros(q + k, width, dtype=torch.bfloat16), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(width, dtype=torch.bfloat16), requires_grad=False)
        self.calls = 0

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.calls += 1
        for name, weight in weights:
            target = self.qk.data.narrow(0, *self.parts[name]) if name in self.parts else getattr(self, name).data
            self.put(target, weight)

    def put(self, target: Tensor, weight: Tensor) -> None:
        target.copy_(weight)

    def random(self, seed: int) -> dict[str, Tensor]:
        """The actor's weights: separate and in float32."""
        generator = torch.Generator().manual_seed(seed)
        (_, q), (_, k), width = *self.parts.values(), self.bias.numel()
        shapes = {"q": (q, width), "bias": (width,), "k": (k, width)}
        return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}

    def holds(self, sent: dict[str, Tensor]) -> bool:
        expected = torch.cat([sent["q"], sent["k"]]).bfloat16(), sent["bias"].bfloat16()
        return all(torch.equal(weight, wanted) for weight, wanted in zip((self.qk, self.bias), expected, strict=True))


class Transposing(Fused):
    def put(self, target: Tensor, weight: Tensor) -> None:
        target.copy_(weight.t().contiguous().t() if weight.dim() == 2 else weight)


class Contiguous(Fused):
    """Holds matrices transposed, as gpt_oss does, and makes them contiguous before it copies them."""

    def __init__(self) -> None:
        super().__init__()
        self.qk = nn.Parameter(torch.zeros(12, 12, dtype=torch.bfloat16), requires_grad=False)

    def put(self, target: Tensor, weight: Tensor) -> None:
        if weight.dim() == 1:
            target.copy_(weight)
        else:
            self.qk.data[:, : weight.shape[0]].copy_(weight.t().contiguous())


class Filling(Fused):
    """Its loader does more than copy, so it cannot be recorded."""

    def put(self, target: Tensor, weight: Tensor) -> None:
        for place, value in enumerate(weight.flatten().tolist()):
            target.view(-1)[place] = value


class Shard(Fused):
    """The first of two ranks: half of the rows of q and k, and half of the columns of `bias`, as engines split them."""

    def __init__(self, q: int = 8, k: int = 4, width: int = 12, forgets: str = "") -> None:
        super().__init__(q // 2, k // 2, width)
        self.bias = nn.Parameter(torch.zeros(width, width // 2, dtype=torch.bfloat16), requires_grad=False)
        self.whole = {"q": (q, width), "bias": (width, width), "k": (k, width)}
        self.forgets = forgets

    def put(self, target: Tensor, weight: Tensor) -> None:
        if tuple(weight.shape) != self.whole.get(self.forgets):
            target.copy_(weight[: target.shape[0], : target.shape[1]])

    def random(self, seed: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return {name: torch.randn(shape, generator=generator) for name, shape in self.whole.items()}

    def holds(self, sent: dict[str, Tensor]) -> bool:
        (_, q), (_, k) = self.parts.values()
        half = sent["bias"][:, : self.bias.shape[1]]
        return super().holds({"q": sent["q"][:q], "k": sent["k"][:k], "bias": half})


class FillingShard(Shard):
    def put(self, target: Tensor, weight: Tensor) -> None:
        for row in range(target.shape[0]):
            for column in range(target.shape[1]):
                target[row, column] = weight[row, column]


def packed(weights: dict[str, Tensor], bucket_bytes: int = 250) -> list[Bucket]:
    return list(pack(weights.items(), torch.bfloat16, bucket_bytes))


@settings(max_examples=30)
@given(q=st.integers(1, 9), k=st.integers(1, 9), width=st.integers(1, 17), bucket_bytes=st.integers(1, 1000))
def test_the_loader_is_called_once_per_bucket_for_any_sizes(q: int, k: int, width: int, bucket_bytes: int) -> None:
    model = Fused(q, k, width)
    loader = InPlaceLoader(model)
    for seed in range(3):
        sent = model.random(seed)
        buckets = packed(sent, bucket_bytes)
        loader.load(buckets)
        assert model.holds(sent)
        assert model.calls == len(buckets)


@pytest.mark.parametrize("kind", [Transposing, Filling])
def test_a_loader_that_does_more_than_copy_is_called_every_time(
    kind: type[Fused], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    model = kind()
    loader = InPlaceLoader(model)
    for seed in range(3):
        sent = model.random(seed)
        buckets = packed(sent)
        loader.load(buckets)
        assert model.holds(sent)
        assert model.calls == (seed + 1) * len(buckets)
    assert "the engine's own loader in every update" in caplog.text


def test_a_transposed_copy_is_recorded() -> None:
    model = Contiguous()
    loader = InPlaceLoader(model)
    for seed in range(3):
        sent = {name: weight for name, weight in model.random(seed).items() if name != "k"}
        sent["q"] = torch.randn(12, 12)
        buckets = packed(sent)
        loader.load(buckets)
        assert torch.equal(model.qk, sent["q"].bfloat16().t())
        assert model.calls == len(buckets)


@pytest.mark.parametrize("width", [16, 12, 10], ids=["by long words", "by short words", "by short words in halves"])
def test_a_shard_copies_and_checks_its_part(width: int) -> None:
    model = Shard(width=width)
    loader = InPlaceLoader(model, sharded=True)
    for seed in range(3):
        sent = model.random(seed)
        buckets = packed(sent, bucket_bytes=500)
        loader.load(buckets)
        assert model.holds(sent)
        assert model.calls == len(buckets)
    changed = packed(model.random(3), bucket_bytes=500)
    changed[0].data[3] ^= 1
    with pytest.raises(WorkerError, match="weights changed on the way"):
        loader.load(changed)
    model.qk.data = model.qk.data.clone()  # no longer the copies' target
    with pytest.raises(WorkerError, match="the weights inside the engine have the checksum"):
        loader.load(packed(model.random(4), bucket_bytes=500))


@pytest.mark.parametrize("kind", [Fused, Shard])
@pytest.mark.parametrize("times", [0, 1], ids=["recorded", "repeated"])
def test_an_update_in_parts_is_checked_as_a_whole(kind: type[Fused], times: int) -> None:
    model = kind()
    loader = InPlaceLoader(model, sharded=kind is Shard)

    def load(buckets: list[Bucket], parts: int) -> None:
        for place in range(parts):
            loader.load(buckets[place : place + 1], begins=place == 0, ends=place == len(buckets) - 1)

    for seed in range(times + 1):
        sent = model.random(seed)
        buckets = packed(sent, 1)
        assert len(buckets) == 3
        load(buckets, 3)
        assert model.holds(sent)
    load(packed(model.random(7), 1), 2)  # one that does not end
    sent = model.random(8)
    load(packed(sent, 1), 3)
    assert model.holds(sent)
    changed = packed(model.random(9), 1)
    changed[1].data[3] ^= 1
    with pytest.raises(WorkerError, match="weights changed on the way"):
        load(changed, 2)
    loader.load(packed(model.random(10), 1)[:1], begins=True, ends=False)
    with pytest.raises(WorkerError, match="the weights inside the engine have the checksum"):
        loader.load([], begins=False, ends=True)


def test_a_shard_that_takes_nothing_from_a_weight_is_not_recorded() -> None:
    assert record(Shard(), packed(Shard().random(0))[0], sharded=True) is not None
    bucket = packed(Shard().random(0), bucket_bytes=10**6)[0]
    assert record(Shard(), bucket, sharded=True) is not None
    assert record(Shard(forgets="k"), bucket, sharded=True) is None


def test_a_shard_whose_loader_does_more_than_copy_is_called_every_time() -> None:
    model = FillingShard()
    loader = InPlaceLoader(model, sharded=True)
    for seed in range(2):
        sent = model.random(seed)
        loader.load(packed(sent))
        assert model.holds(sent)
    changed = packed(model.random(3))
    changed[0].data[3] ^= 1
    with pytest.raises(WorkerError, match="weights changed on the way"):
        loader.load(changed)


def test_a_new_layout_is_recorded_again() -> None:
    model = Fused()
    loader = InPlaceLoader(model)
    for bucket_bytes in (250, 10**6, 250, 10**6):
        sent = model.random(bucket_bytes)
        loader.load(packed(sent, bucket_bytes))
        assert model.holds(sent)
    assert model.calls == 2 + 1


@pytest.mark.parametrize("times", [0, 1, 2], ids=["recorded", "repeated", "repeated again"])
@pytest.mark.parametrize("width", [12, 13], ids=["by long words", "by short words"])
def test_damaged_and_missing_weights_are_refused_in_every_load(times: int, width: int) -> None:
    model = Fused(width=width)
    loader = InPlaceLoader(model)
    for seed in range(times):
        loader.load(packed(model.random(seed)))
    changed = packed(model.random(7))
    changed[-1].data[3] ^= 1
    with pytest.raises(WorkerError, match="weights changed on the way"):
        loader.load(changed)
    with pytest.raises(WorkerError, match="the weights inside the engine have the checksum"):
        loader.load(packed(model.random(8))[:-1])


def test_a_weight_that_no_longer_receives_its_copy_is_noticed() -> None:
    model = Fused()
    loader = InPlaceLoader(model)
    loader.load(packed(model.random(0)))
    model.bias.data = model.bias.data.clone()
    with pytest.raises(WorkerError, match="the weights inside the engine have the checksum"):
        loader.load(packed(model.random(1)))


def test_64_bit_words_are_summed_if_copies_keep_them_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    words: list[Any] = []
    plain = in_place.word_sum
    monkeypatch.setattr(in_place, "word_sum", lambda tensors, word: words.append(word) or plain(tensors, word))
    for width in (12, 13):
        loader = InPlaceLoader(Fused(width=width))
        for seed in range(2):
            words.clear()
            loader.load(packed(Fused(width=width).random(seed)))
        assert set(words) == {torch.int64 if width == 12 else torch.int16}


def test_a_weight_is_summed_after_its_last_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []
    plain = in_place.word_sum
    model = Fused()
    names = {model.qk.data_ptr(): "qk", model.bias.data_ptr(): "bias"}

    def word_sum(tensors: Iterable[Tensor], word: torch.dtype) -> Tensor:
        summed = list(tensors)
        happened.extend(names[tensor.data_ptr()] for tensor in summed if tensor.data_ptr() in names)
        return plain(summed, word)

    def coming(seed: int) -> Iterable[Bucket]:
        for bucket in packed(model.random(seed), bucket_bytes=1):
            happened.append(f"{bucket.layout.names[0]} comes")
            yield bucket

    monkeypatch.setattr(in_place, "word_sum", word_sum)
    loader = InPlaceLoader(model)
    loader.load(coming(0))
    assert sorted(happened[3:]) == ["bias", "qk"]
    for seed in range(1, 3):
        happened.clear()
        loader.load(coming(seed))
        assert happened == ["q comes", "bias comes", "bias", "k comes", "qk"]


class Backend(Enum):
    TRITON = "TRITON"
    FLASHINFER_CUTLASS = "FlashInfer CUTLASS"


def test_kernels_that_reorder_experts_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    check_layout(model)
    model[1].quant_method = SimpleNamespace(unquantized_backend=Backend.TRITON)
    check_layout(model)
    model[1].quant_method = SimpleNamespace(unquantized_backend=Backend.FLASHINFER_CUTLASS)
    with pytest.raises(ConfigError, match="experts of 1 with FlashInfer CUTLASS, which reorders") as caught:
        check_layout(model)
    assert "VLLM_USE_FLASHINFER_MOE_FP16" in caught.value.hint


def test_weights_of_latent_attention_are_derived_again() -> None:
    class Latent(nn.Linear):
        W_UK_T = torch.zeros(2, 2)

        def process_weights_after_loading(self, dtype: torch.dtype) -> None:
            self.W_UK_T.copy_(self.weight.to(dtype).t())

    model = nn.Sequential(nn.Linear(2, 2), Latent(2, 2))
    derive_weights(model, torch.bfloat16)
    assert torch.equal(model[1].W_UK_T, model[1].weight.bfloat16().t().float())


def test_slices_of_experts_are_joined_again() -> None:
    weights = [
        ("a", torch.randn(3)),
        ("experts", torch.randn(5, 4, 2)),
        ("b", torch.randn(3, 3)),
        ("more", torch.randn(2, 2, 2)),
    ]
    sliced = list(in_slices(weights, torch.bfloat16, most_bytes=40))
    assert [name for name, _ in sliced] == ["a", "experts[0:2]", "experts[2:4]", "experts[4:5]", "b", "more"]
    for (name, weight), (expected, whole) in zip(joined(iter(sliced)), weights, strict=True):
        assert name == expected
        assert torch.equal(weight, whole)


def test_buckets_of_kept_types_end_where_the_type_changes() -> None:
    weights = {"a": torch.randn(2), "b": torch.randn(2), "c": torch.arange(3)}
    buckets = list(pack(weights.items(), None))
    assert [bucket.layout.names for bucket in buckets] == [("a", "b"), ("c",)]
    assert all(torch.equal(tensor, weights[name]) for bucket in buckets for name, tensor in bucket.tensors())


def test_loaders_of_vllm_s_models_are_called_once(tmp_path: Path) -> None:
    """Runs in a separate process, because vLLM changes torch when it is imported."""
    program = [sys.executable, PROGRAM, tmp_path]
    done = subprocess.run(program, env=environment(), check=True, timeout=280, stdout=subprocess.PIPE, text=True)
    reports = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert {row["family"] for row in reports} >= {
        "qwen2",
        "qwen3",
        "llama",
        "qwen3_moe",
        "deepseek_v3",
        "glm4_moe",
        "gpt_oss",
    }
    for row in reports:
        assert row["calls"] == [row["buckets"], 0, 0], row["family"]
