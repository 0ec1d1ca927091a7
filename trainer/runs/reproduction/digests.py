"""The SHA-256 of weights: over names, types, shapes and bytes, however they are divided among files and ranks."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trainer.errors import CheckpointError
from trainer.training.ranks.reading import stored_tensors

NETWORK = "network."
_THREADS = 4


def weights_digest(groups: Iterable[Mapping[str, Tensor]]) -> str:
    """The SHA-256 of named tensors, in hexadecimal. They may come in groups, in any order.

    It is that of the lines `NAME SHA256`, sorted, in UTF-8. A tensor's own SHA-256 is that of the JSON list
    [name, type, shape], a line feed, and its values in the machine's (little-endian) byte order.
    """
    lines: list[str] = []
    with ThreadPoolExecutor(_THREADS) as threads:
        for group in groups:
            sums = threads.map(_tensor_digest, group.keys(), group.values())
            lines += [f"{name} {checksum}\n" for name, checksum in zip(group, sums, strict=True)]
    return hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()


def checkpoint_weights(checkpoint: Path) -> dict[str, str]:
    """The SHA-256 of the trained weights in a checkpoint, by role. Raises CheckpointError."""
    roles = sorted(file.parent for file in checkpoint.glob("*/.metadata"))
    if not roles:
        raise CheckpointError(f"{checkpoint}: holds no weights", hint="name another checkpoint")
    return {role.name: weights_digest(stored_tensors(role, NETWORK)) for role in roles}


def model_weights(model: Path) -> dict[str, str]:
    """The SHA-256 of the weights in the safetensors files of a model directory, as {"model": SHA256}.

    Raises CheckpointError if there are none, or if one is damaged.
    """
    files = sorted(model.glob("*.safetensors"))
    try:
        if not files:
            raise FileNotFoundError("no *.safetensors")
        return {"model": weights_digest(_read(file) for file in files)}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{model}: its weights cannot be read: {error}", hint="export the model again") from error


def _read(file: Path) -> dict[str, Tensor]:
    with safe_open(file, "pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a mapping


def _tensor_digest(name: str, tensor: Tensor) -> str:
    header = json.dumps([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)], ensure_ascii=False)
    digest = hashlib.sha256(f"{header}\n".encode())
    digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
