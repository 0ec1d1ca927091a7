"""Records the parameter, rows and tokens behind a non-finite gradient."""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainer.data.batches.batch import Batch
from trainer.models.pretrained import read_tokenizer
from trainer.records.files.atomic import atomic_file
from trainer.training.micro_batches import reduced

FOLDER = "non_finite"
"""The directory of these files in that of the run."""

ROWS_OF_A_RANK = 8
SHOWN = 20


@dataclass(frozen=True)
class FaultFiles:
    """Where a role keeps its faults. `model` is the directory of its tokenizer."""

    directory: Path
    role: str
    model: Path
    kept: Counter[int] = field(default_factory=Counter)
    """How many faults of each update were kept; the same on every rank."""

    def keep(self, update: int, network: nn.Module, batch: Batch, outputs: Tensor) -> str:
        """The cause in a sentence that names the files. Every rank must call it with its rows of the mini-batch.

        `outputs` are the network's log-probs or values, [rows, response length]. Rank 0 writes two files, which every
        rank finds when this returns.
        """
        gradients, weights = non_finite_parameters(network)
        rank, at_fault = dist.get_rank(), non_finite_tokens(batch, outputs)
        chosen = sorted(at_fault)[:ROWS_OF_A_RANK]
        faulty_here = [(row, batch.rows(torch.tensor([row])), outputs[row], at_fault[row]) for row in chosen]
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, faulty_here)
        faulty = [(number, *row) for number, rows in enumerate(ranks) for row in rows]
        self.kept[update] += 1
        number = f"_{self.kept[update]}" if self.kept[update] > 1 else ""
        stem = self.directory / f"{self.role}_update_{update + 1:06d}{number}"
        cause = _cause(gradients, weights, faulty)
        if rank == 0:
            self._write(stem, {"cause": cause, **_listed(gradients, weights)}, faulty)
        reduced(torch.zeros(1))  # no rank ends the run before the files are there
        return f"{cause}; see {stem}.json"

    def _write(
        self, stem: Path, report: dict[str, Any], faulty_rows: list[tuple[int, int, Batch, Tensor, Any]]
    ) -> None:
        tokenizer = read_tokenizer(self.model)
        rows: list[dict[str, Any]] = []
        tensors: dict[str, Tensor] = {}
        for number, (rank, row, batch, output, tokens) in enumerate(faulty_rows):
            ids, prompt = batch.token_ids[0, : int(batch.lengths)].tolist(), int(batch.prompt_lengths)
            texts = {"prompt": tokenizer.decode(ids[:prompt]), "response": tokenizer.decode(ids[prompt:])}
            rows.append({"rank": rank, "row": row, "non_finite_tokens": tokens, **texts})
            tensors |= {f"{number}.{name}": tensor[0].contiguous() for name, tensor in batch.tensors().items()}
            tensors[f"{number}.output"] = output.contiguous()
        with atomic_file(stem.with_suffix(".safetensors")) as path:
            save_file(tensors, path)
        with atomic_file(stem.with_suffix(".json")) as path:
            path.write_text(json.dumps(report | {"rows": rows}, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


class KeptFaults:
    """The controller's view of the files that `FaultFiles` writes: those that came since the last look."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._seen = self._files()

    def new(self) -> list[tuple[Path, str]]:
        """The reports that are new or were replaced, with the cause that each names."""
        files = self._files()
        unseen = sorted(path for path, written in files.items() if self._seen.get(path) != written)
        self._seen = files
        return [(path, json.loads(path.read_text(encoding="utf-8"))["cause"]) for path in unseen]

    def _files(self) -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in self.directory.glob("*.json")}


def non_finite_parameters(network: nn.Module) -> tuple[list[str], list[str]]:
    """The parameters with a gradient that is not finite on any rank, the one next to the loss first, and those with
    such a weight, the one next to the input first. Every rank must call it."""
    named = list(network.named_parameters())
    flags = torch.zeros(2, len(named), dtype=torch.int32)
    for number, (_, parameter) in enumerate(named):
        flags[0, number] = parameter.grad is not None and not _is_finite(parameter.grad)
        flags[1, number] = not _is_finite(parameter)
    flags = reduced(flags, dist.ReduceOp.MAX)
    gradients, weights = ([named[at][0] for at in line.nonzero().flatten().tolist()] for line in flags)
    return gradients[::-1], weights


def non_finite_tokens(batch: Batch, outputs: Tensor) -> dict[int, dict[str, list[int]]]:
    """The tensors of each row that are not finite, with the tokens of the response at which they are not."""
    tokens_by_row: dict[int, dict[str, list[int]]] = {}
    for name, tensor in (*batch.tensors().items(), ("output", outputs)):
        if tensor.dtype.is_floating_point:
            for row, token in (~tensor.isfinite() & batch.response_mask).nonzero().tolist():
                tokens_by_row.setdefault(row, {}).setdefault(name, []).append(token)
    return tokens_by_row


def _is_finite(tensor: Tensor) -> bool:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return bool(local.detach().isfinite().all())


def _cause(gradients: list[str], weights: list[str], rows: Iterable[tuple[int, int, Batch, Tensor, Any]]) -> str:
    first = f"the first is that of {gradients[0]}" if gradients else "the sum of their squares overflows"
    parts = [f"{len(gradients)} gradients are not finite, {first}" if gradients else f"no gradient is, but {first}"]
    if weights:
        parts.append(f"{len(weights)} weights are not finite, the first is {weights[0]}")
    for rank, row, _, _, tokens in rows:
        name, at = next(iter(tokens.items()))
        parts.append(f"{name} of row {row} on rank {rank} is not finite at token {at[0]}")
        break
    else:
        parts.append("all inputs and outputs are finite")
    return "; ".join(parts)


def _listed(gradients: list[str], weights: list[str]) -> dict[str, Any]:
    names_by_kind = {"gradients": gradients, "weights": weights}
    return {name: {"count": len(names), "first": names[:SHOWN]} for name, names in names_by_kind.items()}
