"""One end of a weight channel, for test_channel.py: `channel_program.py RANK SIZE PORT`.

The last bucket is sent by itself, and the last rank leaves before it. Prints a line for each transfer that was sent and
for each bucket that arrived: whether it is what was sent, or the error.
"""

import sys
from collections.abc import Iterator, Sequence

import torch

from trainer.errors import WorkerError
from trainer.training.ranks.process_group import connect_store, open_store
from trainer.weights.buckets import Bucket, pack
from trainer.weights.channel import WeightChannel

TIMEOUT = 120.0


def buckets() -> list[Bucket]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"embedding": (40, 8), "bias": (7,), "head": (8, 40)}
    weights = [(name, torch.randn(shape, generator=generator)) for name, shape in shapes.items()]
    return list(pack(weights, torch.bfloat16, bucket_bytes=512))


def compare(received: Bucket, sent: Bucket) -> str:
    same = all(
        name == wanted and torch.equal(tensor, expected)
        for (name, tensor), (wanted, expected) in zip(received.tensors(), sent.tensors(), strict=True)
    )
    return "same" if same and received.sum == received.packed_sum == sent.sum else "different"


def main(rank: int, size: int, port: int) -> None:
    store = connect_store("127.0.0.1", port, size, TIMEOUT) if rank else open_store("127.0.0.1", size, TIMEOUT)
    if not rank:
        sys.stdout.write(f"{store.port}\n")
        sys.stdout.flush()
    channel = WeightChannel(store, rank, size, torch.device("cpu"), TIMEOUT)
    *most, last = buckets()
    for sent in (most, [last]) if rank < size - 1 else (most,):
        try:
            for line in take(channel, sent) if rank else give(channel, sent):
                sys.stdout.write(f"{line}\n")
        except WorkerError as error:
            sys.stdout.write(f"{error}\n")
    channel.close()


def give(channel: WeightChannel, sent: Sequence[Bucket]) -> Iterator[str]:
    channel.send(sent)
    yield "sent"


def take(channel: WeightChannel, sent: Sequence[Bucket]) -> Iterator[str]:
    yield from map(compare, channel.receive([bucket.layout for bucket in sent]), sent)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
