"""A run that learns from rows of several data sources: mathematics, multiple choice and code."""

import json
import random
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from tests.trainer.whole_run import Runs
from trainer.data.formats.schema import write_table
from trainer.models.small import ModelShape, build_tokenizer, create_model, save_model

TESTS = json.dumps({"inputs": ["1\n", "41\n"], "outputs": ["2\n", "42\n"]})
# Question, data source, ground truth, and the answers that the model knows. One of them is right.
TASKS = (
    ("half of four", "lighteval/MATH", r"\frac{4}{2}", [rf"\boxed{{{number}}}" for number in (1, 2, 3)]),
    ("capital of France", "cais/mmlu", "C", [f"Answer: {letter}" for letter in "ABCD"]),
    ("add one", "taco", TESTS, [f"```python\nprint(int(input())+{number})\n```" for number in (0, 1, 2)]),
)
SOURCES = [source for _, source, _, _ in TASKS]


def knowing_model(directory: Path) -> Path:
    """A model that answers each question with one of the known answers, all about equally likely."""
    tokenizer = build_tokenizer([text for question, _, _, answers in TASKS for text in (question, *answers)])
    model = create_model(tokenizer, ModelShape(), seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    draws = random.Random(0)
    for _ in range(150):
        loss = torch.zeros(())
        for question, _, _, answers in TASKS:
            prompt = chat(tokenizer, question)
            ids = tokenizer(prompt + draws.choice(answers) + tokenizer.eos_token, add_special_tokens=False)["input_ids"]
            known = len(tokenizer(prompt, add_special_tokens=False)["input_ids"])
            labels = torch.tensor([[-100] * known + ids[known:]])
            loss = loss + model(input_ids=torch.tensor([ids]), labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    save_model(model, tokenizer, directory)
    return directory


def chat(tokenizer: Any, question: str) -> str:
    messages = [{"role": "user", "content": question}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def test_mathematics_multiple_choice_and_code_are_learnt_in_one_run(runs: Runs, tmp_path: Path) -> None:
    model = knowing_model(tmp_path / "model")
    rows = [
        {
            "data_source": source,
            "prompt": [{"role": "user", "content": question}],
            "reward_model": {"style": "rule", "ground_truth": truth},
            "extra_info": {"split": "train", "index": index},
        }
        for index, (question, source, truth, _) in enumerate(TASKS)
    ]
    write_table(rows * 2, tmp_path / "train.parquet")
    write_table(rows, tmp_path / "validation.parquet")
    run = runs.start(
        "sources",
        f"model.path={model}",
        f"data.train_files={tmp_path / 'train.parquet'}",
        f"data.validation_files={tmp_path / 'validation.parquet'}",
        "data.train_batch_size=6",
        "data.max_response_length=24",
        "rollout.samples_per_prompt=16",
        "rollout.engine=transformers",
        "algorithm.advantage=grpo",
        # Without the KL, steps this large destroy answers that are already right.
        "algorithm.kl_coefficient=0.05",
        "actor.learning_rate=1e-3",
        "actor.mini_batch_size=96",
        "actor.entropy_coefficient=0",
        "trainer.nnodes=1",
        "trainer.total_steps=24",
        "trainer.test_freq=-1",
        "trainer.save_freq=0",
    )
    errors = run.succeed()
    steps = run.metrics()[1:]
    for source, rule in zip(SOURCES, ("math", "multiple_choice", "code"), strict=True):
        assert f"2 prompts of '{source}', scored by {rule}" in errors
        rewards = [row[f"reward/source/{source}"] for row in steps]
        # With four seeds, the first two were at most 0.44 and the last four at least 0.87.
        assert fmean(rewards[:2]) < 0.6
        assert fmean(rewards[-4:]) > 0.75
    assert steps[-1]["validation/exact_match"] == 1.0
    assert all(row["reward/failed"] == 0 for row in steps)
