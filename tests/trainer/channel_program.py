"""One end of a channel for weights, for test_weight_channel.py: `channel_program.py RANK SIZE PORT`.

Prints a line for each bucket: whether it is what was sent, or the error. The last rank leaves before the last bucket.
"""

import sys

import torch

from trainer.errors import EngineError
from trainer.training.process_group import connect_store, open_store
from trainer.training.weights import PackedWeights, pack
from trainer.weight_channel import Announcement, WeightChannel

TIMEOUT = 120.0


def buckets() -> list[PackedWeights]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"embedding": (40, 8), "bias": (7,), "head": (8, 40)}
    weights = [(name, torch.randn(shape, generator=generator)) for name, shape in shapes.items()]
    return list(pack(weights, torch.bfloat16, bucket_bytes=512))


def receive(channel: WeightChannel, sent: PackedWeights) -> str:
    received = channel.receive(Announcement(sent.layout, sent.data.numel(), sent.checksum))
    expected = [(name, shape, piece) for name, shape, piece in sent.layout.pieces(sent.data)]
    same = all(
        name == wanted and tuple(tensor.shape) == shape and torch.equal(tensor.flatten().view(torch.uint8), piece)
        for (name, tensor), (wanted, shape, piece) in zip(received.tensors(), expected, strict=True)
    )
    return "same" if same and received.arrived_sum() == received.checksum else "different"


def main(rank: int, size: int, port: int) -> None:
    store = connect_store("127.0.0.1", port, size, TIMEOUT) if rank else open_store("127.0.0.1", size, TIMEOUT)
    if not rank:
        sys.stdout.write(f"{store.port}\n")
        sys.stdout.flush()
    channel = WeightChannel(store, rank, size, torch.device("cpu"), TIMEOUT)
    for number, bucket in enumerate(packed := buckets()):
        if rank == size - 1 and number == len(packed) - 1:
            return
        try:
            if rank:
                line = receive(channel, bucket)
            else:
                channel.send(bucket.data)
                line = "sent"
        except EngineError as error:
            line = str(error)
        sys.stdout.write(f"{line}\n")
    channel.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
