"""How a rollout worker hands weights to its engine. A stand-in takes them, because a real one on a GPU needs one."""

from types import SimpleNamespace

import pytest
import ray
import torch

from trainer.cluster.place import RankPlace, Team
from trainer.config.tree import Config
from trainer.roles import rollout
from trainer.roles.rollout import RolloutWorker
from trainer.weights.buckets import Bucket, StoredBucket, pack, store


@pytest.mark.parametrize(("device", "method"), [("cuda", "copy_weights"), ("cpu", "replace_weights")])
def test_weights_from_the_object_store_are_copied_in_place_on_gpus(
    device: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = {"a": torch.randn(5, 3), "b": torch.randn(7)}
    sent = [store(bucket) for bucket in pack(weights.items(), torch.bfloat16, bucket_bytes=1)]
    given: list[Bucket] = []
    engine = SimpleNamespace(**{method: given.extend})
    monkeypatch.setattr(rollout, "choose_engine", lambda _setting: ("vllm", "it is installed"))
    monkeypatch.setattr(rollout, "open_engine", lambda *_: engine)
    monkeypatch.setattr(rollout, "end_token_ids", lambda _model: [0])
    monkeypatch.setattr(StoredBucket, "on", lambda bucket, _device: bucket.open())
    worker = RolloutWorker(Config.model_validate({"model": {"path": "model"}}), RankPlace(0, 1, "", device), Team())
    monkeypatch.setattr(ray, "get", lambda references: references)
    worker.replace_weights(sent)  # type: ignore[arg-type]
    buckets = [bucket.open() for bucket in given]
    assert all(bucket.sum == bucket.packed_sum for bucket in buckets)
    arrived = dict(weight for bucket in buckets for weight in bucket.tensors())
    assert arrived.keys() == weights.keys()
    assert all(torch.equal(arrived[name], weight.bfloat16()) for name, weight in weights.items())
