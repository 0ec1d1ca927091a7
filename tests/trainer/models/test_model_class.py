"""A run trains a model that it can export as what it was; others are refused before anything starts."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
)

from trainer.config.tree import Config
from trainer.errors import DataError
from trainer.models.export import write_language_model
from trainer.models.files import check_models, load_tokenizer
from trainer.models.pretrained import load_language_model
from trainer.models.small import build_tokenizer

TOKENIZER = build_tokenizer(["How many are 1 + 2? #### 3"])
TEXT = {
    "vocab_size": len(TOKENIZER),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": TOKENIZER.pad_token_id,
}
LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
QWEN_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 4,
    "num_position_embeddings": 16,
}
VISION = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def written(directory: Path, model: PreTrainedModel) -> Path:
    model.save_pretrained(directory)
    TOKENIZER.save_pretrained(directory)
    return directory


def qwen3_5(directory: Path) -> Path:
    config = AutoConfig.for_model("qwen3_5", text_config=TEXT | LINEAR, vision_config=QWEN_VISION)
    return written(directory, AutoModelForImageTextToText.from_config(config, dtype=torch.float32))


def plain(directory: Path, kind: Any = AutoModelForCausalLM, **more: object) -> Path:
    return written(directory, kind.from_config(AutoConfig.for_model("qwen2", **TEXT, **more), dtype=torch.float32))


def check(model: Path, **roles: object) -> None:
    check_models(Config.model_validate({"model": {"path": model}, **roles}))


def refusal(model: Path, **roles: object) -> DataError:
    with pytest.raises(DataError) as caught:
        check(model, **roles)
    return caught.value


def test_a_model_with_a_vision_tower_is_refused_and_its_text_part_is_not(tmp_path: Path) -> None:
    model = qwen3_5(tmp_path / "whole")
    error = refusal(model)
    assert f"model.path={model} is a Qwen3_5ForConditionalGeneration" in str(error)
    assert "its text part alone, a Qwen3_5ForCausalLM" in str(error)
    # The hint, followed to the letter:
    assert "AutoModelForCausalLM.from_pretrained(MODEL).save_pretrained(DIRECTORY)" in error.hint
    part = tmp_path / "part"
    AutoModelForCausalLM.from_pretrained(model).save_pretrained(part)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(model / name, part / name)
    check(part)
    load_tokenizer(Config.model_validate({"model": {"path": part}}).model)
    assert type(load_language_model(part)).__name__ == "Qwen3_5ForCausalLM"


def test_a_model_that_is_no_language_model_is_refused_by_one_name(tmp_path: Path) -> None:
    config = AutoConfig.for_model("mistral3", text_config=TEXT | {"model_type": "mistral"}, vision_config=VISION)
    config.architectures = ["Mistral3ForConditionalGeneration"]
    config.save_pretrained(tmp_path)
    error = refusal(tmp_path)
    assert "no causal language model of the type mistral3 (Mistral3ForConditionalGeneration)" in str(error)
    assert "images and audio are not supported" in error.hint
    assert len(str(error)) < 300


@pytest.mark.parametrize(
    ("kind", "name", "type_"),
    [
        ("llama4", "Llama4ForConditionalGeneration", "vision_config"),
        ("mllama", "MllamaForConditionalGeneration", "vision_config"),
        ("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", "vision_config"),
        ("emu3", "Emu3ForConditionalGeneration", "vq_config"),
        ("qwen2", "Qwen2ForSequenceClassification", ""),
        ("qwen3", "Qwen3Model", ""),
        ("bart", "BartForConditionalGeneration", ""),
        ("bert", "BertForMaskedLM", ""),
    ],
)
def test_any_other_class_than_the_exported_one_is_refused(kind: str, name: str, type_: str, tmp_path: Path) -> None:
    settings = {"model_type": kind, "vocab_size": 512, "architectures": [name], **({type_: VISION} if type_ else {})}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    error = refusal(tmp_path)
    assert f"is a {name}" in str(error)
    assert ("text part" in str(error)) == bool(type_)


@pytest.mark.parametrize("names", [None, [], ["Qwen2ForCausalLM"], ["QWEN2ForCausalLM"], ["Other", "Qwen2ForCausalLM"]])
def test_the_class_of_a_language_model_is_accepted(names: list[str] | None, tmp_path: Path) -> None:
    file = plain(tmp_path) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"architectures": names}))
    check(tmp_path)


def test_a_model_that_is_trained_with_its_vision_tower_is_exported_with_it(tmp_path: Path) -> None:
    config = AutoConfig.for_model("gemma3", text_config=TEXT, vision_config=VISION)
    model = written(tmp_path / "model", AutoModelForImageTextToText.from_config(config, dtype=torch.float32))
    (model / "preprocessor_config.json").write_text('{"image_processor_type": "Gemma3ImageProcessor"}')
    check(model)
    weights = load_language_model(model).state_dict()
    write_language_model(model, weights.items(), torch.float32, tmp_path / "export")
    was, is_ = (json.loads((path / "config.json").read_text()) for path in (model, tmp_path / "export"))
    assert (is_["architectures"], is_["model_type"]) == (was["architectures"], was["model_type"])
    exported = AutoModelForImageTextToText.from_pretrained(tmp_path / "export").state_dict()
    assert all(torch.equal(exported[name], weight) for name, weight in weights.items())
    assert (tmp_path / "export" / "preprocessor_config.json").read_bytes() == (
        model / "preprocessor_config.json"
    ).read_bytes()


def test_weights_that_a_model_lacks_are_not_drawn_at_random(tmp_path: Path) -> None:
    """Without a name of its class, only its weights tell a headless model."""
    file = plain(tmp_path, AutoModel, tie_word_embeddings=False) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"architectures": None}))
    check(tmp_path)
    with pytest.raises(DataError, match=r"its files lack lm_head\.weight: as a Qwen2ForCausalLM"):
        load_language_model(tmp_path)
    load_language_model(tmp_path, needs_head=False)  # of a critic


def test_a_critic_may_start_from_a_reward_model_but_not_from_another_kind(tmp_path: Path) -> None:
    model = plain(tmp_path / "model")
    critic = plain(tmp_path / "critic", AutoModelForSequenceClassification, num_labels=1)
    check(model, critic={"path": critic})
    load_language_model(critic, needs_head=False)
    file = critic / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "siglip"}))
    assert f"critic.path={critic}: " in str(refusal(model, critic={"path": critic}))


def test_a_teacher_may_have_a_vision_tower(tmp_path: Path) -> None:
    teacher = {"distillation": {"teacher": qwen3_5(tmp_path / "teacher")}, "algorithm": {"advantage": "grpo"}}
    check(plain(tmp_path / "model"), **teacher, rollout={"samples_per_prompt": 2})
    assert AutoTokenizer.from_pretrained(tmp_path / "model").eos_token_id == TOKENIZER.eos_token_id
