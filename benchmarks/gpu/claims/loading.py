"""A batch of tokenised prompts from a file.

The baseline is torch's `DataLoader` over the rows of the file, which applies the chat template and the tokenizer to
each row when it is read; the faster of no worker processes and one per core, up to 8.
Here the prompts are tokenised once, at the start, and the next batch is read while the current one is used. Batches are
drawn one after the other, so that neither side can hide its work behind a step. Needs no GPU.
"""

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu.common import timed, write_job


class RowsOfFile:
    """A dataset of torch: one row of the file, tokenised."""

    def __init__(self, file: Path, tokenizer: Any) -> None:
        import pyarrow.parquet as pq

        self._rows = pq.read_table(file).to_pylist()
        self._tokenizer = tokenizer

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> list[int]:
        messages = self._rows[index]["prompt"]
        text = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        token_ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return token_ids


def measure(options: argparse.Namespace) -> dict[str, Any]:
    from transformers import AutoTokenizer

    prompt, size = (64, 64) if options.cpu else (512, 512)
    job = write_job(options.jobs / f"{options.shape}-{prompt}-loading", options.shape, prompt, prompts=16 * size)
    tokenizer = AutoTokenizer.from_pretrained(job / "model")
    workers = min(8, os.cpu_count() or 1)
    loaders = [by_loader(job / "train.parquet", tokenizer, size, workers) for workers in (0, workers)]
    return {
        "job": f"batches of {size} prompts of {prompt} tokens",
        "baseline": min(loaders, key=lambda loader: loader["milliseconds"]),
        "ours": by_trainer(job / "train.parquet", tokenizer, prompt, size),
    }


def by_loader(file: Path, tokenizer: Any, size: int, workers: int) -> dict[str, float]:
    from torch.utils.data import DataLoader

    begin = time.perf_counter()
    loader = DataLoader(
        RowsOfFile(file, tokenizer),  # type: ignore[arg-type]
        size,
        shuffle=True,
        num_workers=workers,
        collate_fn=list,
        multiprocessing_context="spawn" if workers else None,
    )
    batches = iter(loader)
    return {**_drawn(begin, lambda: next(batches), len(loader)), "workers": workers}


def by_trainer(file: Path, tokenizer: Any, prompt: int, size: int) -> dict[str, float]:
    from trainer.config.sections.data import DataConfig
    from trainer.data.batches.prefetch import Prefetcher
    from trainer.data.dataset import PromptSampler, open_dataset

    begin = time.perf_counter()
    dataset = open_dataset([file], tokenizer, DataConfig(max_prompt_length=prompt, train_batch_size=size))
    prefetcher = Prefetcher(dataset, PromptSampler(len(dataset), size, shuffle=True, seed=0))
    return _drawn(begin, prefetcher.next_batch, len(dataset) // size)


def _drawn(begin: float, next_batch: Callable[[], Any], count: int) -> dict[str, float]:
    """Mean milliseconds of a batch after the first, and the seconds from the start to the first and to the last."""
    next_batch()
    first = time.perf_counter() - begin
    rest = timed(lambda: [next_batch() for _ in range(count - 1)])
    return {
        "milliseconds": round(1000 * rest / (count - 1), 2),
        "first_batch_seconds": round(first, 3),
        "epoch_seconds": round(first + rest, 3),
    }
