"""Which text of a conversation is learned, for templates that end turns in every way that families do."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.data import chat_templates as templates
from tests.trainer.data.chat_templates import tokenizer_of
from trainer.config.sections.data import DataConfig
from trainer.config.sft import SftSettings
from trainer.data.completions import Completion
from trainer.data.dataset import PromptDataset
from trainer.data.demonstrations import read_demonstrations
from trainer.data.formats.turns import Part, TurnFinder, encode
from trainer.data.preferences import read_labelled, read_pairs
from trainer.errors import DataError
from trainer.experience.environment import MessageTokens

USER, ANSWER = {"role": "user", "content": "1+2?"}, {"role": "assistant", "content": "3"}
CONVERSATION = [USER, ANSWER, {"role": "user", "content": "And 4?"}, {"role": "assistant", "content": "7"}]
THOUGHT = {**ANSWER, "reasoning_content": "1 and 2"}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1}'}}]}
CALLING = [USER, CALL, {"role": "tool", "content": "3"}, {"role": "assistant", "content": "It is 3"}]


def learned(
    template: str, messages: Sequence[dict[str, Any]], first: int = 0, kwargs: dict[str, Any] | None = None
) -> list[str]:
    settings = DataConfig(chat_template_kwargs=kwargs or {})
    parts = TurnFinder(tokenizer_of(template)).parts("row 0", list(messages), first, settings, [])
    return [part.text for part in parts if part.learned]


# TRL learns the same text, but for the end that GLM's template leaves to the next message; its training templates mark
# that one.
@pytest.mark.parametrize(
    ("template", "messages", "turns"),
    [
        (templates.GEMMA, [USER, ANSWER], ["3<end_of_turn>\n"]),
        (templates.GEMMA, [USER, {**ANSWER, "content": " 3 \n"}], ["3<end_of_turn>\n"]),
        (templates.GEMMA, CONVERSATION, ["3<end_of_turn>\n", "7<end_of_turn>\n"]),
        (templates.PHI, [USER, ANSWER], ["3<|end|>\n<|endoftext|>"]),
        (templates.PHI, CONVERSATION, ["3<|end|>\n", "7<|end|>\n<|endoftext|>"]),
        (templates.GLM, [USER, ANSWER], ["\n<think></think>\n3<|user|>"]),
        (templates.GLM, [USER, THOUGHT], ["\n<think>1 and 2</think>\n3<|user|>"]),
        (templates.GLM, CONVERSATION, ["\n<think></think>\n3<|user|>", "\n<think></think>\n7<|user|>"]),
        (
            templates.GLM,
            CALLING,
            ["\n<think></think>\n<tool_call>add</tool_call><|observation|>", "\n<think></think>\nIt is 3<|user|>"],
        ),
        (templates.GLM, CALLING[:2], ["\n<think></think>\n<tool_call>add</tool_call><|observation|>"]),
        (templates.QWEN, [USER, ANSWER], ["<think>\n\n</think>\n\n3<|im_end|>\n"]),
        (templates.QWEN, [USER, THOUGHT], ["<think>\n1 and 2\n</think>\n\n3<|im_end|>\n"]),
        (templates.QWEN, CONVERSATION, ["3<|im_end|>\n", "<think>\n\n</think>\n\n7<|im_end|>\n"]),
        (
            templates.QWEN,
            CALLING,
            [
                '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|im_end|>\n',
                "<think>\n\n</think>\n\nIt is 3<|im_end|>\n",
            ],
        ),
        (templates.R1, CONVERSATION, ["3<eos>", "7<eos>"]),
        (templates.HARMONY, [USER, ANSWER], ["<|channel|>final<|message|>3<|return|>"]),
        (
            templates.HARMONY,
            CONVERSATION,
            ["<|channel|>final<|message|>3<|end|>", "<|channel|>final<|message|>7<|return|>"],
        ),
        (templates.MISTRAL, CONVERSATION, [" 3</s>", " 7</s>"]),
        (templates.MARKED, CONVERSATION, ["3<|im_end|>", "7<|im_end|>"]),
        (templates.PLAIN, CONVERSATION, ["3\n", "7\n"]),
    ],
)
def test_a_turn_is_learned_as_the_template_writes_it(
    template: str, messages: list[dict[str, Any]], turns: list[str]
) -> None:
    assert learned(template, messages) == turns


@pytest.mark.parametrize("template", templates._SPECIAL)
def test_only_messages_from_the_first_on_are_learned(template: str) -> None:
    assert learned(template, CONVERSATION, first=2) == learned(template, CONVERSATION)[1:]


def test_an_opening_with_a_thought_is_not_learned() -> None:
    quick = {"enable_thinking": False}
    assert learned(templates.QWEN, CONVERSATION, kwargs=quick) == ["3<|im_end|>\n", "7<|im_end|>\n"]


@pytest.mark.parametrize(
    ("template", "messages", "words"),
    [
        (templates.GEMMA, [USER, THOUGHT], "message 1: the chat template leaves out its reasoning_content"),
        (templates.GEMMA, [USER, {**ANSWER, "thinking": "1 and 2"}], "leaves out its thinking"),
        (templates.GEMMA, CALLING[:2], "message 1: the chat template leaves out its tool_calls"),
        (templates.R1, [USER, {**ANSWER, "content": "<think>1 and 2</think>3"}], "leaves out its content"),
        (templates.QWEN, [USER, THOUGHT, *CONVERSATION[2:]], "message 1: the chat template leaves out its reasoning"),
        ("{{ messages[-1].content }}", CONVERSATION, "message 1: the chat template writes it, or messages before it"),
        (
            "{{ messages | length }}{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}",
            [USER, ANSWER],
            "message 1: the chat template writes it, or messages before it, differently",
        ),
        (templates.GEMMA, [USER], "no message of the assistant to learn"),
        (
            templates.GEMMA.replace(
                "{{ bos_token }}", "{{ bos_token }}{{ raise_exception('no') if messages | length > 1 }}"
            ),
            [USER, ANSWER],
            "the model's chat template rejects these messages: no",
        ),
    ],
)
def test_a_template_that_does_not_show_the_turn_is_refused(
    template: str, messages: list[dict[str, Any]], words: str
) -> None:
    tokenizer = tokenizer_of(templates.GEMMA)
    tokenizer.chat_template = template
    with pytest.raises(DataError, match=f"row 0: .*{words}"):
        TurnFinder(tokenizer).parts("row 0", list(messages), 0, DataConfig(), [])


def test_a_template_without_an_end_of_turns_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    finder = TurnFinder(tokenizer_of(templates.PLAIN))
    with caplog.at_level(logging.WARNING):
        learned(templates.GEMMA, CONVERSATION)
        assert caplog.messages == []
        for _ in range(2):
            finder.parts("row 0", list(CONVERSATION), 0, DataConfig(), [])
    assert [message.partition(":")[0] for message in caplog.messages] == [
        "the chat template ends turns with no special token"
    ]


def rows(path: Path, row: dict[str, Any], *others: dict[str, Any]) -> list[Path]:
    path.write_text("".join(json.dumps(record) + "\n" for record in (row, *others)))
    return [path]


def texts(tokenizer: Any, completion: Completion) -> tuple[str, str]:
    """The text before the first learned token, and the learned tokens as text."""
    learned_tokens = [token for token, learned in zip(completion.response, completion.learned, strict=True) if learned]
    return tokenizer.decode(completion.prompt), tokenizer.decode(learned_tokens)


@pytest.mark.parametrize("template", [templates.GEMMA, templates.PHI, templates.GLM, templates.QWEN, templates.MISTRAL])
@pytest.mark.parametrize("prompt", ["1+2?", [USER]])
def test_every_reader_writes_the_same_tokens(tmp_path: Path, template: str, prompt: Any) -> None:
    tokenizer, data = tokenizer_of(template), DataConfig()
    row = {"prompt": prompt, "data_source": "here", "reward_model": {"ground_truth": "3"}}
    asked = PromptDataset(rows(tmp_path / "prompts.jsonl", row), tokenizer, data)[0].token_ids
    (answer,) = learned(template, [USER, ANSWER])
    completions = []
    for response in ("3", [ANSWER], [USER, ANSWER]):
        (pair,) = read_pairs(
            rows(tmp_path / "pairs.jsonl", {"prompt": prompt, "chosen": response, "rejected": "4"}), tokenizer, data
        )
        labelled = {"prompt": prompt, "completion": response, "label": True}
        other = {"prompt": prompt, "completion": "4", "label": False}
        desired, _ = read_labelled(rows(tmp_path / "labels.jsonl", labelled, other), tokenizer, data)
        (tuned,) = read_demonstrations(rows(tmp_path / "sft.jsonl", labelled), tokenizer, data, SftSettings())
        completions += [pair.chosen, desired.completion, tuned]
    talk = {"messages": [USER, ANSWER]}
    completions += read_demonstrations(
        rows(tmp_path / "talk.jsonl", talk), tokenizer, data, SftSettings(messages_key="messages")
    )
    assert {completion.prompt for completion in completions} == {asked}
    assert {texts(tokenizer, completion) for completion in completions} == {(tokenizer.decode(asked), answer)}


def test_the_rows_tools_and_thinking_reach_the_template_of_every_reader(tmp_path: Path) -> None:
    tokenizer, data = tokenizer_of(templates.QWEN), DataConfig()
    tokenizer.chat_template = "{% for tool in tools or [] %}[{{ tool.name }}]{% endfor %}" + templates.QWEN
    row = {"prompt": "1+2?", "completion": "3", "chosen": "3", "rejected": "4", "label": True}
    row |= {"tools": [{"name": "add"}], "enable_thinking": False}
    (pair,) = read_pairs(rows(tmp_path / "pairs.jsonl", row), tokenizer, data)
    labelled, _ = read_labelled(rows(tmp_path / "labels.jsonl", row, row | {"label": False}), tokenizer, data)
    (tuned,) = read_demonstrations(rows(tmp_path / "sft.jsonl", row), tokenizer, data, SftSettings())
    expected = "[add]<|im_start|>user\n1+2?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    for completion in (pair.chosen, labelled.completion, tuned):
        assert texts(tokenizer, completion) == (expected, "3<|im_end|>\n")


def test_the_messages_of_tools_and_users_in_a_response_are_not_learned(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(templates.GLM)
    row = {"prompt": "1+2?", "chosen": CALLING[1:], "rejected": CONVERSATION}
    data = DataConfig(max_response_length=200)
    (pair,) = read_pairs(rows(tmp_path / "pairs.jsonl", row), tokenizer, data)
    assert texts(tokenizer, pair.chosen)[1] == "".join(learned(templates.GLM, CALLING))
    assert texts(tokenizer, pair.rejected)[1] == "".join(learned(templates.GLM, CONVERSATION))
    assert "And 4?" in tokenizer.decode(pair.rejected.response)


@pytest.mark.parametrize("response", [[{"role": "user", "content": "4?"}, ANSWER], [USER]])
def test_a_response_that_is_none_to_the_prompt_is_refused(tmp_path: Path, response: list[dict[str, Any]]) -> None:
    row = {"prompt": "1+2?", "chosen": response, "rejected": "4"}
    with pytest.raises(DataError, match="row 0: chosen begins with a message of"):
        read_pairs(rows(tmp_path / "pairs.jsonl", row), tokenizer_of(templates.GEMMA), DataConfig())


@pytest.mark.parametrize("column", ["images", "videos"])
def test_rows_with_vision_are_refused_by_every_reader(tmp_path: Path, column: str) -> None:
    tokenizer = tokenizer_of(templates.GEMMA)
    file = rows(tmp_path / "a.jsonl", {"prompt": "1+2?", "completion": "3", "label": True, column: ["a.png"]})
    for read in (
        lambda: read_labelled(file, tokenizer, DataConfig()),
        lambda: read_demonstrations(file, tokenizer, DataConfig(), SftSettings()),
    ):
        with pytest.raises(DataError, match=f"row 0: column {column} is not empty"):
            read()


def test_the_prompt_has_the_tokens_that_the_model_is_asked_with() -> None:
    # As one text, both line feeds would be one token.
    tokenizer = tokenizer_of(templates.PLAIN)
    token_ids, marks = encode([Part("assistant\n", False), Part("\n3", True)], tokenizer)
    alone = tokenizer("assistant\n")["input_ids"]
    assert (token_ids[: len(alone)], marks) == (alone, [False] * len(alone) + [True] * 2)
    assert tokenizer.decode(token_ids) == "assistant\n\n3"
    whole, marks = encode([Part("a\n\n", False), Part("3", True)], tokenizer)
    assert (whole, marks) == (tokenizer("a\n\n3")["input_ids"], [False, False, True])


def test_a_text_that_continues_begins_without_the_blank_that_some_tokenizers_put_before_texts() -> None:
    from tokenizers import normalizers

    tokenizer = tokenizer_of(templates.PLAIN)
    tokenizer.backend_tokenizer.normalizer = normalizers.Prepend("x")
    token_ids, _ = encode([Part("a", False), Part("3", True)], tokenizer)
    assert tokenizer.decode(token_ids) == "xa3"


@pytest.mark.parametrize(
    ("template", "last", "expected"),
    [
        (templates.GEMMA, "<end_of_turn>", "\n<start_of_turn>user\nAnd 4?<end_of_turn>\n<start_of_turn>model\n"),
        (templates.GEMMA, "3", "<end_of_turn>\n<start_of_turn>user\nAnd 4?<end_of_turn>\n<start_of_turn>model\n"),
        (templates.PHI, "<|end|>", "\n<|user|>\nAnd 4?<|end|>\n<|assistant|>\n"),
        (templates.GLM, "<|user|>", "\nAnd 4?<|assistant|>"),
        (templates.GLM, "<|endoftext|>", "<|user|>\nAnd 4?<|assistant|>"),
        (templates.MISTRAL, "</s>", "[INST] And 4? [/INST]"),
        (templates.HARMONY, "<|end|>", "<|start|>user<|message|>And 4?<|end|><|start|>assistant"),
    ],
)
def test_a_conversation_goes_on_after_the_end_that_the_policy_wrote(template: str, last: str, expected: str) -> None:
    tokenizer = tokenizer_of(template)
    (token,) = tokenizer(last, add_special_tokens=False)["input_ids"]
    messages = [{"role": "user", "content": "And 4?"}]
    assert tokenizer.decode(MessageTokens(tokenizer, DataConfig())(messages, token)) == expected
