from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from trainer.errors import DataError
from trainer.models.small import ModelShape, build_tokenizer, create_model, save_model

TEXTS = ["Ann has 7 apples and finds 5 more.", "7+5=12\n#### 12"] * 20
TOKENIZER = build_tokenizer(TEXTS, 300)


@given(text=st.text(alphabet=st.characters(codec="ascii", exclude_categories=["Cc"])))
def test_text_survives_the_tokenizer(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER(text, add_special_tokens=False)["input_ids"]) == text


def test_a_number_is_one_token_per_digit_and_a_frequent_word_one_token() -> None:
    tokens = [TOKENIZER.decode([token]) for token in TOKENIZER("finds 1275 apples")["input_ids"]]
    assert tokens[-6:] == [" ", "1", "2", "7", "5", " apples"]


def test_chat_roles_are_single_tokens() -> None:
    messages = [{"role": "user", "content": "7?"}, {"role": "assistant", "content": "7"}]
    text = TOKENIZER.apply_chat_template(messages, tokenize=False)
    assert text == "<|user|>7?<|assistant|>7<|end|>"
    assert TOKENIZER(text, add_special_tokens=False)["input_ids"][-1] == TOKENIZER.eos_token_id
    prompt = TOKENIZER.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert text.startswith(prompt)


def test_a_saved_model_loads_with_the_same_tokens_and_logits(tmp_path: Path) -> None:
    model = create_model(TOKENIZER, ModelShape(hidden_size=64, intermediate_size=128, attention_heads=2), seed=0)
    for _ in range(2):  # the second save replaces the first
        save_model(model, TOKENIZER, tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model", local_files_only=True)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", local_files_only=True)
    tokens = TOKENIZER(TEXTS[1], return_tensors="pt")["input_ids"]
    assert tokenizer(TEXTS[1], return_tensors="pt")["input_ids"].tolist() == tokens.tolist()
    assert (tokenizer.eos_token, tokenizer.pad_token) == (TOKENIZER.eos_token, TOKENIZER.pad_token)
    torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits)


def test_the_seed_determines_the_weights() -> None:
    def weights(seed: int) -> torch.Tensor:
        return create_model(TOKENIZER, ModelShape(), seed).get_input_embeddings().weight

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


def test_a_directory_without_a_model_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(DataError, match="not a model"):
        save_model(None, None, tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"
