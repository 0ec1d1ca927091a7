"""The weight channel: one process broadcasts to several. Over gloo, because NCCL needs two GPUs."""

import gc
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from trainer.cluster.nodes import ClusterNode, Slot
from trainer.config.tree import Config
from trainer.errors import ConfigError, WorkerError
from trainer.models.small import ModelShape, build_tokenizer, create_model, save_model
from trainer.rollout.backends.transformers import TransformersEngine
from trainer.weights import channel as weight_channel
from trainer.weights.buckets import Bucket, pack
from trainer.weights.channel import WeightChannel
from trainer.weights.transfer import TRANSPORTS, choose_transport

PROGRAM = Path(__file__).with_name("channel_program.py")


def start(rank: int, port: int) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, PROGRAM, str(rank), "3", str(port)],
        env={**os.environ, "PYTHONPATH": str(PROGRAM.parents[3])},
        stdout=subprocess.PIPE,
        text=True,
    )


def test_over_gloo_all_receive_the_weights_and_all_notice_a_lost_peer() -> None:
    sender = start(0, 0)
    assert sender.stdout is not None
    port = int(sender.stdout.readline())
    receivers = [start(1, port), start(2, port)]
    # No process waits for its own timeout of 120 s.
    sent, stayed, left = (process.communicate(timeout=100)[0].splitlines() for process in (sender, *receivers))
    assert sent[0] == "sent"
    assert stayed[: len(left)] == left == ["same"] * len(left)
    assert len(left) == 2
    # The last bucket lacks a receiver, so every peer that depends on it sees the connection break.
    assert "the weight channel broke" in "".join(sent[1:] + stayed[-1:])


def test_an_engine_holds_one_bucket_while_the_next_is_in_flight(tmp_path: Path) -> None:
    """Uses Transformers, which copies in place on CPU as well."""
    tokenizer = build_tokenizer(["What is 1 + 2? #### 3"])
    model = create_model(tokenizer, ModelShape(), seed=0)
    save_model(model, tokenizer, tmp_path / "model")
    engine = TransformersEngine(Config.model_validate({"model": {"path": tmp_path / "model"}}), "cpu", [])
    packed = list(pack(model.named_parameters(), torch.float32, bucket_bytes=2**17))
    sent, store, cpu = {bucket.data.data_ptr() for bucket in packed}, dist.HashStore(), torch.device("cpu")

    def send() -> None:
        channel = WeightChannel(store, 0, 2, cpu, timeout=60)
        channel.send(packed)

    in_memory = []

    def count(bucket: Bucket) -> Bucket:
        tensors = [
            tensor for tensor in gc.get_objects() if type(tensor) is torch.Tensor and tensor.dtype == torch.uint8
        ]
        in_memory.append(len({tensor.untyped_storage().data_ptr() for tensor in tensors} - sent))
        return bucket

    sender = threading.Thread(target=send)
    sender.start()
    channel = WeightChannel(store, 1, 2, cpu, timeout=60)
    engine.copy_weights(map(count, channel.receive([bucket.layout for bucket in packed])))
    sender.join()
    assert len(packed) > 3
    assert in_memory == [2] * (len(packed) - 1) + [1]
    engine.copy_weights(packed[:2], ends=False)
    engine.copy_weights(packed[2:], begins=False)
    engine.copy_weights(packed[:2], ends=False)
    with pytest.raises(WorkerError, match="weights were not sent"):
        engine.copy_weights(packed[3:], begins=False)


def test_a_first_transfer_that_never_returns_times_out_with_a_stand_in_for_nccl(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NCCL connects all peers in the first transfer, and waits forever for a dead one."""
    over = threading.Event()

    def broadcast(*_: object) -> None:
        over.wait(60)
        raise RuntimeError("over")

    stuck = SimpleNamespace(broadcast=broadcast, abort=lambda: None)
    monkeypatch.setattr(weight_channel, "_gloo", lambda *_: stuck)
    with pytest.raises(WorkerError, match=r"not all engines joined the weight channel within 0\.2 s"):
        WeightChannel(store=None, rank=0, size=2, device=torch.device("cpu"), timeout=0.2)
    over.set()


def slots(device: str, *ranks: int) -> list[Slot]:
    return [Slot(rank, ClusterNode("id", "10.0.0.1", cpus=8, gpus=4), device, 0, 1, group=None) for rank in ranks]


@pytest.mark.parametrize(
    ("setting", "device", "actor", "engines", "way", "reason"),
    [
        ("auto", "cuda", (0, 1), (2, 3), "NCCL", "every engine and the actor's first rank have their own GPU"),
        ("broadcast", "cuda", (0, 1), (1, 2), "NCCL", "the actor's first rank have their own GPU"),
        ("auto", "cuda", (0, 1), (0, 2), "Ray's object store", "some engines share a GPU"),
        ("auto", "cuda", (0,), (1, 1), "Ray's object store", "some engines share a GPU"),
        ("object_store", "cuda", (0,), (1,), "Ray's object store", "rollout.weight_transfer=object_store"),
        ("auto", "cpu", (0,), (1,), "Ray's object store", "there is no GPU"),
        ("broadcast", "cpu", (0,), (0,), "gloo", "rollout.weight_transfer=broadcast"),
    ],
)
def test_nccl_is_chosen_if_every_peer_has_its_own_gpu(
    setting: str, device: str, actor: tuple[int, ...], engines: tuple[int, ...], way: str, reason: str
) -> None:
    chosen, why = choose_transport(setting, slots(device, *actor), slots(device, *engines), on_shared_gpus=False)
    assert chosen == way
    assert reason in why
    assert chosen in TRANSPORTS


def test_shared_gpus_use_cuda_ipc_and_an_impossible_broadcast_is_refused() -> None:
    same = slots("cuda", 0, 1)
    assert choose_transport("broadcast", same, same, on_shared_gpus=True)[0] == "CUDA IPC"
    with pytest.raises(ConfigError, match="which NCCL refuses"):
        choose_transport("broadcast", same, slots("cuda", 0, 2), on_shared_gpus=False)


def test_a_deterministic_run_never_connects_actor_and_engines_through_nccl() -> None:
    """vLLM's batch-invariant mode sets NCCL's algorithm and protocol in the engine's process only."""
    apart = slots("cuda", 0), slots("cuda", 1)
    chosen, why = choose_transport("auto", *apart, on_shared_gpus=False, deterministic=True)
    assert (chosen, "trainer.deterministic" in why) == ("Ray's object store", True)
