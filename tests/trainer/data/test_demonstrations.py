"""Rows of files as demonstrations: which tokens there are, and which of them are learned."""

import json
from pathlib import Path
from typing import Any

import pytest

from trainer.config.sections.data import DataConfig
from trainer.config.sft import SftSettings
from trainer.data.completions import Completion
from trainer.data.demonstrations import read_demonstrations
from trainer.errors import DataError
from trainer.models.small import build_tokenizer

USER, ANSWER = {"role": "user", "content": "1+2?"}, {"role": "assistant", "content": "3"}
CONVERSATION = [USER, ANSWER, {"role": "user", "content": "And 4?"}, {"role": "assistant", "content": "7"}]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer(["How many are 1 + 2? #### 3"])


def read(path: Path, tokenizer: Any, row: dict[str, Any], data: DataConfig | None = None, **sft: Any) -> Completion:
    file = path / "train.jsonl"
    file.write_text(json.dumps(row) + "\n")
    (completion,) = read_demonstrations([file], tokenizer, data or DataConfig(), SftSettings(**sft))
    return completion


def learned(completion: Completion, tokenizer: Any) -> str:
    return str(
        tokenizer.decode(
            [token for token, trains in zip(completion.response, completion.learned, strict=True) if trains]
        )
    )


@pytest.mark.parametrize("prompt", ["1+2?", [USER]])
@pytest.mark.parametrize("response", ["3", [ANSWER]])
def test_prompt_and_response_are_text_or_messages(tmp_path: Path, tokenizer: Any, prompt: Any, response: Any) -> None:
    completion = read(tmp_path, tokenizer, {"prompt": prompt, "completion": response})
    assert tokenizer.decode(completion.prompt) == "<|user|>1+2?<|assistant|>"
    assert tokenizer.decode(completion.response) == learned(completion, tokenizer) == "3<|end|>"


def test_keys_enter_mappings(tmp_path: Path, tokenizer: Any) -> None:
    row = {"extra_info": {"question": "1+2?", "answer": "3"}}
    data = DataConfig(prompt_key="extra_info.question")
    completion = read(tmp_path, tokenizer, row, data, response_key="extra_info.answer")
    assert tokenizer.decode(completion.prompt + completion.response) == "<|user|>1+2?<|assistant|>3<|end|>"


def test_every_message_of_the_assistant_is_learned(tmp_path: Path, tokenizer: Any) -> None:
    completion = read(tmp_path, tokenizer, {"messages": CONVERSATION}, messages_key="messages")
    whole = tokenizer.apply_chat_template(CONVERSATION, tokenize=False)
    assert tokenizer.decode(completion.prompt + completion.response) == whole
    assert learned(completion, tokenizer) == "3<|end|>7<|end|>"


def test_what_follows_the_last_message_of_the_assistant_is_left_out(tmp_path: Path, tokenizer: Any) -> None:
    completion = read(tmp_path, tokenizer, {"messages": [*CONVERSATION, USER]}, messages_key="messages")
    assert completion.learned[-1]
    assert tokenizer.decode(completion.response).endswith("7<|end|>")


def test_a_template_that_rewrites_earlier_messages_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    only_last = "{{ '<|user|>' + messages[-1]['content'] }}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    tokenizer = build_tokenizer(["1"])
    tokenizer.chat_template = only_last
    with pytest.raises(DataError, match=r"row 0: message 1: the chat template writes it"):
        read(tmp_path, tokenizer, {"messages": CONVERSATION}, messages_key="messages")


@pytest.mark.parametrize(
    ("way", "prompt", "response"),
    [("truncate_left", "+2?<|assistant|>", "3<|end|>"), ("truncate_right", "<|user|>1+2?<|assistant|>", "3")],
)
def test_long_rows_are_cut_at_either_side(tmp_path: Path, tokenizer: Any, way: str, prompt: str, response: str) -> None:
    row = {"prompt": "1+2?", "completion": "3"}
    whole = read(tmp_path, tokenizer, row)
    length = len(whole.prompt) + len(whole.response)
    cut = 2 if way == "truncate_left" else 1
    data = DataConfig.model_validate({"overlong_prompts": way})
    completion = read(tmp_path, tokenizer, row, data, max_length=length - cut)
    assert tokenizer.decode(completion.prompt) == prompt
    assert tokenizer.decode(completion.response) == response


@pytest.mark.parametrize(
    ("row", "sft", "words"),
    [
        ({"prompt": "1+2?", "completion": "3" * 40}, {"max_length": 20}, "row 0: the row has .* sft.max_length is 20"),
        ({"prompt": "1+2?", "completion": None}, {}, "row 0: no completion"),
        ({"prompt": "1+2?"}, {}, "no column completion"),
        ({"messages": [USER]}, {"messages_key": "messages"}, "row 0: no message of the assistant to learn"),
        ({"messages": []}, {"messages_key": "messages"}, "row 0: messages is empty"),
    ],
)
def test_a_row_that_cannot_be_learned_is_named(
    tmp_path: Path, tokenizer: Any, row: dict[str, Any], sft: dict[str, Any], words: str
) -> None:
    with pytest.raises(DataError, match=rf"train\.jsonl.*{words}"):
        read(tmp_path, tokenizer, row, **sft)


def test_without_files_there_are_no_demonstrations(tokenizer: Any) -> None:
    assert read_demonstrations([], tokenizer, DataConfig(), SftSettings()) == []
