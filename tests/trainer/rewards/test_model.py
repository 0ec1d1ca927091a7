"""A reward model on a tiny classifier: its input, independence of batches, and refused models."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Qwen2Config

from trainer.cluster.calls import Task
from trainer.cluster.place import RankPlace
from trainer.config.tree import Config
from trainer.data.dataset import Prompt
from trainer.errors import DataError, RewardError
from trainer.experience.collector import Collector, mean_parts
from trainer.experience.reward_workers import RewardWorkers
from trainer.experience.run_data import RunData
from trainer.experience.trajectory import Trajectory
from trainer.models.files import check_models, reads_tokens
from trainer.models.small import ModelShape, build_tokenizer, create_model, save_model
from trainer.models.weight_files import parameter_count
from trainer.rewards.answer import Answer, Scored
from trainer.rewards.model import RewardModel
from trainer.rewards.scores import weighted_sums
from trainer.roles.reward import RewardWorker

PLACE = RankPlace(0, 1, "here", "cpu")


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "policy"
    tokenizer = build_tokenizer(["How many are 1 + 2? #### 3"])
    save_model(create_model(tokenizer, ModelShape(), seed=0), tokenizer, path)
    return path


def write_classifier(path: Path, tokenizer: Any, labels: int = 1) -> Path:
    """A small classifier with random weights, a random head included."""
    torch.manual_seed(1)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Qwen2Config(vocab_size=len(tokenizer), num_key_value_heads=1, num_labels=labels, **shape)
    model = AutoModelForSequenceClassification.from_config(config)
    torch.nn.init.normal_(model.score.weight)
    save_model(model, tokenizer, path)
    return path


@pytest.fixture(scope="module")
def reward_model(policy: Path) -> Path:
    return write_classifier(policy.parent / "reward_model", AutoTokenizer.from_pretrained(policy))


def settings(policy: Path, reward_model: Path, **more: Any) -> Config:
    reward = {"name": "exact_match", "model": {"path": reward_model, **more}}
    return Config.model_validate({"model": {"path": policy}, "reward": reward})


def answers(tokenizer: Any, *responses: str) -> list[Answer]:
    prompt = tokenizer("<|user|>How many?<|assistant|>")["input_ids"]
    messages = [{"role": "user", "content": "How many?"}]
    return [
        Answer(
            text,
            "3",
            prompt_ids=prompt,
            response_ids=[*tokenizer(text)["input_ids"], tokenizer.eos_token_id],
            messages=messages,
        )
        for text in responses
    ]


def plain_score(reward_model: Path, tokens: list[int]) -> float:
    """Transformers' score of a single text."""
    model = AutoModelForSequenceClassification.from_pretrained(reward_model).eval()
    with torch.no_grad():
        return float(model(input_ids=torch.tensor([tokens])).logits)


@pytest.mark.parametrize("padding", ["its own", "the end token", "none"])
def test_batched_scores_equal_the_scores_of_single_texts(policy: Path, reward_model: Path, padding: str) -> None:
    model = RewardModel(settings(policy, reward_model, micro_batch_size=2), torch.device("cpu"))
    tokenizer = model._tokenizer
    if padding != "its own":
        tokenizer.pad_token = tokenizer.eos_token if padding == "the end token" else None
    asked = answers(tokenizer, "3", "How many are 1 + 2? #### 3", "", "12", "#### 3")
    expected = [plain_score(reward_model, [*answer.prompt_ids, *answer.response_ids]) for answer in asked]
    assert model.score(asked) == pytest.approx(expected, abs=1e-5)
    assert len(set(expected)) == 5
    assert model.score([]) == []


def test_a_model_with_another_vocabulary_uses_its_own_chat_template(policy: Path, tmp_path: Path) -> None:
    tokenizer = build_tokenizer(["Quite other words, How many are there of them?"] * 3, vocabulary_size=300)
    reward_model = write_classifier(tmp_path / "reward_model", tokenizer)
    config = settings(policy, reward_model)
    assert not reads_tokens(config)
    check_models(config)
    (score,) = RewardModel(config, torch.device("cpu")).score(answers(tokenizer, "12"))
    assert score == pytest.approx(
        plain_score(reward_model, tokenizer("<|user|>How many?<|assistant|>12<|end|>")["input_ids"])
    )
    with pytest.raises(DataError, match="has another vocabulary than"):
        check_models(settings(policy, reward_model, input="tokens"))
    tokenizer.chat_template = None
    tokenizer.save_pretrained(reward_model)
    (reward_model / "chat_template.jinja").unlink(missing_ok=True)
    (score,) = RewardModel(config, torch.device("cpu")).score(answers(tokenizer, "12"))
    assert score == pytest.approx(plain_score(reward_model, tokenizer("How many?", "12")["input_ids"]))


def test_a_long_text_keeps_its_last_tokens(policy: Path, reward_model: Path) -> None:
    model = RewardModel(settings(policy, reward_model, max_length=4), torch.device("cpu"))
    (asked,) = answers(model._tokenizer, "How many are 1 + 2? #### 3")
    expected = plain_score(reward_model, [*asked.prompt_ids, *asked.response_ids][-4:])
    assert model.score([asked]) == pytest.approx([expected], abs=1e-5)


def test_rule_and_model_scores_are_weighted(policy: Path, reward_model: Path) -> None:
    config = settings(policy, reward_model, weight=0.5)
    config = config.model_copy(update={"reward": config.reward.model_copy(update={"weight": 2.0})})
    right, wrong = RewardWorker(config, PLACE).score(answers(AutoTokenizer.from_pretrained(policy), "3", "4"))
    assert (right.rule, wrong.rule) == (1.0, 0.0)
    assert right.value == pytest.approx(2.0 + 0.5 * right.parts["model"])
    assert wrong.value == pytest.approx(0.5 * wrong.parts["model"])


def test_a_score_that_is_not_finite_is_refused(policy: Path, reward_model: Path) -> None:
    with pytest.raises(RewardError, match=r"the reward model .*reward_model returned nan") as caught:
        weighted_sums([Scored(1.0)], [float("nan")], settings(policy, reward_model).reward)
    assert "float32" in caught.value.hint


def test_an_unsuitable_reward_model_is_refused_before_anything_starts(
    policy: Path, reward_model: Path, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=r"Qwen2ForCausalLM with 2 labels is not a reward model") as caught:
        check_models(settings(policy, policy))
    assert "one label" in caught.value.hint
    two = write_classifier(tmp_path / "two", AutoTokenizer.from_pretrained(policy), labels=2)
    with pytest.raises(DataError, match="ForSequenceClassification with 2 labels"):
        check_models(settings(policy, two))
    with pytest.raises(ValueError, match=r"reward\.weight=0 leaves nothing to score with"):
        Config.model_validate({"reward": {"weight": 0}})


def test_a_head_without_weights_is_refused(policy: Path, reward_model: Path, tmp_path: Path) -> None:
    """Transformers makes such a head from the weights of a language model."""
    tokenizer = AutoTokenizer.from_pretrained(policy)
    save_model(create_model(tokenizer, ModelShape(), seed=0), tokenizer, tmp_path / "headless")
    config = json.loads((tmp_path / "headless" / "config.json").read_text())
    config |= {"architectures": ["Qwen2ForSequenceClassification"], "id2label": {"0": "good"}}
    (tmp_path / "headless" / "config.json").write_text(json.dumps(config))
    check_models(settings(policy, tmp_path / "headless"))
    with pytest.raises(DataError, match=r"its weights lack score\.weight: its scores would be random"):
        RewardModel(settings(policy, tmp_path / "headless"), torch.device("cpu"))
    assert parameter_count(reward_model) > 0


class FakeGroup:
    """A reward worker in this process."""

    def __init__(self, worker: RewardWorker) -> None:
        self.worker = worker

    def __len__(self) -> int:
        return 1

    def attempt(self, tasks: Mapping[int, Task[Any, Any]], _timeout: float) -> tuple[dict[int, Any], dict[int, Any]]:
        return {rank: getattr(self.worker, task.method)(*task.arguments) for rank, task in tasks.items()}, {}


def test_the_model_gets_the_tokens_of_the_response_from_a_fake_worker(policy: Path, reward_model: Path) -> None:
    config = settings(policy, reward_model)
    tokenizer = AutoTokenizer.from_pretrained(policy)
    collector = Collector.__new__(Collector)
    group: Any = FakeGroup(RewardWorker(config, PLACE))
    collector.config, collector.reward = config, RewardWorkers(group, config)
    collector.data = RunData(tokenizer, [], [], None)
    prompt = Prompt(0, tuple(tokenizer("<|user|>1 + 2<|assistant|>")["input_ids"]), "3", "", "1 + 2")
    response = [*tokenizer("3")["input_ids"], tokenizer.eos_token_id]
    row = Trajectory(prompt.token_ids, 1.0, 0, 16, token_ids=response, mask=[True] * len(response))
    (scored,) = collector.score([prompt], [row])
    model = plain_score(reward_model, [*prompt.token_ids, *response])
    assert scored.parts == pytest.approx({"rule": 1.0, "model": model}, abs=1e-5)
    assert mean_parts([scored, Scored(5.0)]) == scored.parts  # an environment's own score has no parts
