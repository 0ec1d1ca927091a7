"""The prompts of a run, tokenised, and the order in which training draws them."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.data.schema import read_parquet
from trainer.errors import CheckpointError, DataError

_COLUMNS = ("data_source", "prompt", "reward_model", "extra_info")
_HINT = "make the file with `python -m trainer data arithmetic` or `python -m trainer data gsm8k`"


@dataclass(frozen=True)
class Prompt:
    """One question as the engines see it; `index` is its place in the dataset."""

    index: int
    token_ids: tuple[int, ...]
    ground_truth: str
    data_source: str
    question: str


class PromptDataset:
    """All prompts of some parquet files, in file order, with the chat template applied.

    Raises DataError if a file is missing, damaged, empty or of another shape, or if a prompt has more than
    `max_prompt_length` tokens: prompts are neither cut nor left out.
    """

    def __init__(self, files: Sequence[Path], tokenizer: Any, max_prompt_length: int) -> None:
        if not files:
            raise DataError("no prompt files are given", hint=_HINT)
        self._prompts: list[Prompt] = []
        for file in files:
            rows = read_parquet(file, _COLUMNS, _HINT)
            for number, (row, text) in enumerate(zip(rows, _render(file, rows, tokenizer), strict=True)):
                token_ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
                if len(token_ids) > max_prompt_length:
                    raise DataError(
                        f"{file}, row {number}: the prompt has {len(token_ids)} tokens, "
                        f"data.max_prompt_length is {max_prompt_length}",
                        hint=f"set data.max_prompt_length={len(token_ids)} or more, or shorten the prompt",
                    )
                self._prompts.append(_prompt(len(self._prompts), token_ids, row))

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index: int) -> Prompt:
        return self._prompts[index]


def _render(file: Path, rows: list[dict[str, Any]], tokenizer: Any) -> list[str]:
    for number, row in enumerate(rows):
        if not row["prompt"] or not row["reward_model"] or row["reward_model"].get("ground_truth") is None:
            raise DataError(f"{file}, row {number}: prompt or reward_model.ground_truth is empty", hint=_HINT)
    return [tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True) for row in rows]


def _prompt(index: int, token_ids: tuple[int, ...], row: dict[str, Any]) -> Prompt:
    question = (row["extra_info"] or {}).get("question") or row["prompt"][-1]["content"]
    return Prompt(index, token_ids, str(row["reward_model"]["ground_truth"]), row["data_source"], question)


class PromptSampler:
    """Draws batches of prompt indices without end, each epoch in its own order.

    A batch that reaches an epoch's end goes on into the next epoch, so that every prompt is drawn once per epoch and
    every batch is full. The order depends on (seed, epoch) only: a restored sampler continues with the same batches.
    """

    def __init__(self, size: int, batch_size: int, shuffle: bool, seed: int) -> None:
        if size < 1 or batch_size < 1:
            raise DataError(f"cannot draw batches of {batch_size} from {size} prompts", hint=_HINT)
        self._size, self._batch_size, self._shuffle, self._seed = size, batch_size, shuffle, seed
        self._start_epoch(0)

    def next_batch(self) -> list[int]:
        """The next `batch_size` indices."""
        batch: list[int] = []
        while len(batch) < self._batch_size:
            if self._position == self._size:
                self._start_epoch(self._epoch + 1)
            drawn = self._order[self._position : self._position + self._batch_size - len(batch)]
            self._position += len(drawn)
            batch += drawn
        return batch

    def state_dict(self) -> dict[str, int]:
        """Where the sampler stands, as plain numbers."""
        return {"epoch": self._epoch, "position": self._position, "size": self._size, "seed": self._seed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continues where `state` was taken. Raises CheckpointError if it is of other data or another seed."""
        for name, mine in (("size", self._size), ("seed", self._seed)):
            if state[name] != mine:
                raise CheckpointError(
                    f"the checkpoint drew its prompts with {name} {state[name]}, this run has {name} {mine}",
                    hint="resume with the training files and trainer.seed of the run that wrote the checkpoint",
                )
        self._start_epoch(state["epoch"])
        self._position = state["position"]

    def _start_epoch(self, epoch: int) -> None:
        self._epoch, self._position = epoch, 0
        self._order = list(range(self._size))
        if self._shuffle:
            random.Random(f"{self._seed}/{epoch}").shuffle(self._order)
