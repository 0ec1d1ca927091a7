import json
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.config.warm_start import WarmStartConfig
from trainer.data.arithmetic import write_arithmetic
from trainer.errors import DataError
from trainer.models.small import ModelShape, build_tokenizer, create_model
from trainer.runs.offline.warm_start import Exercise, answer_loss, make_warm_start

EXAMPLES = [Exercise([5, 6, 7], [8, 1], "8"), Exercise([5, 6], [8, 9, 1], "89")]


@pytest.fixture(scope="module")
def tokenizer() -> object:
    return build_tokenizer(["7+5=12\n#### 12", "How many apples?"] * 20, 300)


def test_the_loss_covers_only_answers_for_any_padding(tokenizer: object) -> None:
    model = create_model(tokenizer, ModelShape(), seed=0)
    expected = []
    for example in EXAMPLES:
        tokens = torch.tensor([example.question + example.answer])
        log_probs = model(tokens).logits[0, len(example.question) - 1 : -1].log_softmax(-1)
        expected += [-log_probs[place, token] for place, token in enumerate(example.answer)]
    torch.testing.assert_close(answer_loss(model, EXAMPLES), torch.stack(expected).mean())


@pytest.mark.timeout(300)
def test_a_warm_start_imitates_the_demonstrations(tmp_path: Path) -> None:
    _, demonstrations, validation = write_arithmetic(tmp_path, 2048, 128, 4, dropped_carries=0.0, seed=0)
    config = WarmStartConfig(
        train_files=[demonstrations], validation_files=[validation], output=tmp_path / "model", steps=120
    )
    assert make_warm_start(config).exact_match > 0.9  # prompts of different lengths, decoded in one padded batch
    assert (tmp_path / "model" / "tokenizer.json").is_file()


def test_files_without_worked_answers_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere\.parquet: no such file"):
        make_warm_start(WarmStartConfig(train_files=[tmp_path / "nowhere.parquet"], output=tmp_path / "model"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra_info": {"split": "train"}}, r"no extra_info\.answer"),
        ({"extra_info": {"answer": 3}}, r"extra_info\.answer is int instead of text"),
        ({"reward_model": {"style": "rule"}}, r"no reward_model\.ground_truth"),
        ({"prompt": [5]}, "column prompt is neither text nor a list of messages"),
        ({"prompt": []}, "the prompt is empty"),
    ],
)
def test_a_row_without_a_worked_answer_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    row = {
        "prompt": [{"role": "user", "content": "How many are 1 + 2?"}],
        "reward_model": {"style": "rule", "ground_truth": "3"},
        "extra_info": {"answer": "#### 3"},
    }
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in (row, {**row, **change})))
    with pytest.raises(DataError, match=rf"train\.jsonl, row 1: {message}"):
        make_warm_start(WarmStartConfig(train_files=[file], validation_files=[file], output=tmp_path / "model"))


def test_the_rate_rises_and_falls_unless_a_schedule_is_given() -> None:
    plain = WarmStartConfig(steps=20)
    assert [plain.rate_factor(step) for step in (0, 1, 10, 19)] == pytest.approx([0.5, 0.95, 0.5, 0.05])
    chosen = WarmStartConfig.model_validate({"steps": 20, "schedule": {"name": "cosine", "warmup_steps": 2}})
    assert [chosen.rate_factor(step) for step in (0, 1, 2, 11)] == pytest.approx([0.0, 0.5, 1.0, 0.5])
