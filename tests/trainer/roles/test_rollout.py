"""How a rollout worker hands weights to its engine. A stand-in takes them, because a real one on a GPU needs one."""

from types import SimpleNamespace

import pytest
import ray
import torch

from trainer.roles.rollout import RolloutWorker
from trainer.weights.buckets import pack, store


@pytest.mark.parametrize(("device", "method"), [("cuda", "copy_weights"), ("cpu", "replace_weights")])
def test_weights_from_the_object_store_are_copied_in_place_on_gpus(
    device: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = {"a": torch.randn(5, 3), "b": torch.randn(7)}
    sent = [store(bucket) for bucket in pack(weights.items(), torch.bfloat16, bucket_bytes=1)]
    given = []
    worker = RolloutWorker.__new__(RolloutWorker)
    worker._place = SimpleNamespace(device=device)  # type: ignore[assignment]
    worker._device = torch.device("cpu")
    worker._engine = SimpleNamespace(**{method: given.extend})  # type: ignore[assignment]
    monkeypatch.setattr(ray, "get", lambda references: references)
    worker.replace_weights(sent)  # type: ignore[arg-type]
    buckets = [bucket.open() for bucket in given]
    assert all(bucket.sum == bucket.packed_sum for bucket in buckets)
    found = dict(weight for bucket in buckets for weight in bucket.tensors())
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weight.bfloat16()) for name, weight in weights.items())
