"""Supervised warm start: a small random model learns to answer like the demonstrations, right or wrong.

PPO can only reinforce what a policy sometimes gets right, so it needs a start that is neither random nor perfect.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers.utils import logging as transformers_logging

from trainer.algorithms.optimization.optimizers import OPTIMIZERS
from trainer.config.sections.data import DataConfig
from trainer.config.warm_start import WarmStartConfig
from trainer.data.dataset import PromptSampler
from trainer.data.formats.files import read_rows
from trainer.data.formats.messages import Messages, checked_text, text_messages
from trainer.data.formats.turns import TurnFinder, encode
from trainer.errors import DataError
from trainer.models.files import decode
from trainer.models.small import ModelShape, build_tokenizer, create_model, save_model
from trainer.records.console import Column, progress
from trainer.rewards.rules.gsm8k import gsm8k

_HINT = "make the file with `python -m trainer data arithmetic`"
_IGNORED = -100  # cross_entropy's mark for positions without a target
_VALIDATION_BATCH = 256  # prompts decoded at a time
_COLUMNS = (Column("loss", "loss", ".4f"), Column("exact_match", "exact match", ".1%"))


@dataclass(frozen=True)
class WorkedAnswer:
    """A row of a file: messages with a question, its worked answer, and the number that the answer should reach."""

    where: str
    messages: Messages
    answer: str
    ground_truth: str


@dataclass(frozen=True)
class Exercise:
    """A question with its worked answer, as tokens; the answer includes the end of the turn."""

    question: list[int]
    answer: list[int]
    ground_truth: str


@dataclass(frozen=True)
class WarmStart:
    """The result: the model's directory and the share of held-out questions that it answers."""

    output: Path
    exact_match: float


def make_warm_start(config: WarmStartConfig) -> WarmStart:
    """Trains a new model and writes it to `config.output`. Raises DataError if a file cannot be used."""
    transformers_logging.disable_progress_bar()
    demonstrations, held_out = _read(config.train_files), _read(config.validation_files)
    if len(demonstrations) < config.batch_size:
        raise DataError(
            f"batch_size={config.batch_size}: a step would repeat the {len(demonstrations)} rows of train_files",
            hint=f"set batch_size={len(demonstrations)} or less",
        )
    tokenizer = build_tokenizer(_texts(demonstrations), config.vocabulary_size)
    model = create_model(tokenizer, _shape(config), config.seed).to("cuda" if torch.cuda.is_available() else "cpu")
    train, validation = _tokenized(demonstrations, tokenizer), _tokenized(held_out, tokenizer)
    exact_match = _learn(model, tokenizer, train, validation, config)
    save_model(model, tokenizer, config.output)
    return WarmStart(config.output, exact_match)


def _shape(config: WarmStartConfig) -> ModelShape:
    heads = config.hidden_size // 32
    return ModelShape(config.layers, config.hidden_size, 4 * config.hidden_size, heads, heads // 2)


def read_exercises(files: list[Path], tokenizer: Any) -> list[Exercise]:
    """The questions and worked answers of the files. Raises DataError."""
    return _tokenized(_read(files), tokenizer)


def _read(files: list[Path]) -> list[WorkedAnswer]:
    return [
        _worked_answer(f"{file}, row {number}", row)
        for file in files
        for number, row in enumerate(read_rows(file, ("prompt", "reward_model", "extra_info"), _HINT))
    ]


def _worked_answer(where: str, row: dict[str, Any]) -> WorkedAnswer:
    """Raises DataError if the row has no prompt, no `extra_info.answer` or no `reward_model.ground_truth`."""
    messages = text_messages(where, "prompt", row["prompt"], _HINT, role="user")
    if not messages:
        raise DataError(f"{where}: the prompt is empty", hint=_HINT)
    answers = []
    for column, name in (("extra_info", "answer"), ("reward_model", "ground_truth")):
        value = row[column].get(name) if isinstance(row[column], dict) else None
        if value is None:
            raise DataError(f"{where}: no {column}.{name}", hint=_HINT)
        answers.append(checked_text(f"{where}: {column}.{name}", value, _HINT))
    return WorkedAnswer(where, messages, *answers)


def _texts(rows: list[WorkedAnswer]) -> list[str]:
    return [text for row in rows for text in (row.messages[-1]["content"], row.answer)]


def _tokenized(rows: list[WorkedAnswer], tokenizer: Any) -> list[Exercise]:
    finder, examples = TurnFinder(tokenizer), []
    for row in rows:
        messages = [*row.messages, {"role": "assistant", "content": row.answer}]
        token_ids, learned = encode(finder.parts(row.where, messages, len(row.messages), DataConfig(), ()), tokenizer)
        question = learned.index(True)
        examples.append(Exercise(token_ids[:question], token_ids[question:], row.ground_truth))
    return examples


def _learn(
    model: Any, tokenizer: Any, train: list[Exercise], validation: list[Exercise], config: WarmStartConfig
) -> float:
    """Trains the model in place; returns the last exact match."""
    optimizer = getattr(torch.optim, OPTIMIZERS[config.optimizer.name].torch)(
        model.parameters(),
        lr=config.learning_rate,
        weight_decay=config.weight_decay,
        **config.optimizer.arguments,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, config.rate_factor)
    batches = _batches(train, config.batch_size, config.seed)
    exact_match = 0.0
    with progress(config.steps, 0, _COLUMNS) as shown:
        shown.phase("warm start")
        for step in range(1, config.steps + 1):
            optimizer.zero_grad()
            loss = answer_loss(model, next(batches))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_gradient_norm)
            optimizer.step()
            schedule.step()
            metrics = {}
            if step % config.test_freq == 0 or step == config.steps:
                exact_match = greedy_exact_match(model, tokenizer, validation, config.max_response_length)
                metrics = {"loss": loss.item(), "exact_match": exact_match}
            shown.step(step, metrics)
    return exact_match


def _batches(examples: list[Exercise], size: int, seed: int) -> Iterator[list[Exercise]]:
    sampler = PromptSampler(len(examples), size, shuffle=True, seed=seed)
    while True:
        yield [examples[index] for index in sampler.next_batch()]


def answer_loss(model: Any, examples: list[Exercise]) -> Any:
    """Mean cross entropy over the answers' tokens, a scalar tensor. Questions carry no loss."""
    width = max(len(example.question) + len(example.answer) for example in examples)
    tokens = torch.zeros(len(examples), width, dtype=torch.long)
    targets = torch.full((len(examples), width), _IGNORED)
    for row, example in enumerate(examples):
        end = len(example.question) + len(example.answer)
        tokens[row, :end] = torch.tensor(example.question + example.answer)
        targets[row, len(example.question) - 1 : end - 1] = torch.tensor(example.answer)
    # With padding on the right, causal attention needs no mask.
    logits = model(input_ids=tokens.to(model.device)).logits
    return cross_entropy(logits.flatten(0, 1), targets.to(model.device).flatten(), ignore_index=_IGNORED)


@torch.no_grad()
def greedy_exact_match(model: Any, tokenizer: Any, examples: list[Exercise], max_response_length: int) -> float:
    """The share of questions that greedy decoding answers correctly."""
    right = 0.0
    for start in range(0, len(examples), _VALIDATION_BATCH):
        batch = examples[start : start + _VALIDATION_BATCH]
        width = max(len(example.question) for example in batch)
        padding = [width - len(example.question) for example in batch]
        prompts = [
            [tokenizer.pad_token_id] * pad + example.question for pad, example in zip(padding, batch, strict=True)
        ]
        mask = [[0] * pad + [1] * (width - pad) for pad in padding]
        generated = model.generate(
            torch.tensor(prompts, device=model.device),
            attention_mask=torch.tensor(mask, device=model.device),
            max_new_tokens=max_response_length,
            do_sample=False,
        )
        responses = decode(tokenizer, generated[:, width:].tolist())
        right += sum(gsm8k(response, example.ground_truth) for response, example in zip(responses, batch, strict=True))
    return right / len(examples)
