"""Prompts from Parquet files: lengths, refusals, the token cache, and custom dataset classes."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainer.config.custom_code import CustomCode
from trainer.config.sections.data import DataConfig
from trainer.data import dataset
from trainer.data.arithmetic import write_arithmetic
from trainer.data.dataset import PromptDataset, open_dataset
from trainer.data.subset import Subset
from trainer.errors import ConfigError, DataError
from trainer.models.small import build_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer(["How many are 1 + 2? #### 3"])


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_arithmetic(tmp_path_factory.mktemp("data"), 40, 4, max_number=9, dropped_carries=0.5, seed=0)[0]


def write(path: Path, **columns: list[Any]) -> Path:
    row = {
        "data_source": ["here"],
        "prompt": [[{"role": "user", "content": "How many are 1 + 2?"}]],
        "reward_model": [{"style": "rule", "ground_truth": "3"}],
        "extra_info": [{"split": "train", "index": 0}],
    }
    chosen = {name: values for name, values in {**row, **columns}.items() if values}
    pq.write_table(pa.table(chosen), path)
    return path


def test_a_prompt_is_the_templated_question_with_the_columns_for_its_reward(file: Path, tokenizer: Any) -> None:
    prompts = PromptDataset([file], tokenizer, DataConfig(max_prompt_length=128))
    row = pq.read_table(file).to_pylist()[3]
    assert len(prompts) == 40
    assert tokenizer.decode(prompts[3].token_ids) == f"<|user|>{row['extra_info']['question']}<|assistant|>"
    assert prompts[3].ground_truth == row["reward_model"]["ground_truth"]
    assert prompts[3].data_source == "slipway/arithmetic"
    assert prompts[3].extra_info["answer"] == row["extra_info"]["answer"]


def test_a_prompt_of_plain_text_is_one_message_of_the_user(tmp_path: Path, tokenizer: Any) -> None:
    messages = PromptDataset([write(tmp_path / "a.parquet")], tokenizer, DataConfig())[0]
    text = PromptDataset([write(tmp_path / "b.parquet", prompt=["How many are 1 + 2?"])], tokenizer, DataConfig())[0]
    assert (text.token_ids, text.messages) == (messages.token_ids, messages.messages)


def test_a_prompt_lies_in_a_mapping(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "a.parquet", extra_info=[{"asked": {"text": "1+2?"}}])
    prompts = PromptDataset([path], tokenizer, DataConfig(prompt_key="extra_info.asked.text"))
    assert tokenizer.decode(prompts[0].token_ids) == "<|user|>1+2?<|assistant|>"


def test_files_are_read_one_after_the_other(file: Path, tokenizer: Any) -> None:
    prompts = PromptDataset([file, file], tokenizer, DataConfig(max_prompt_length=128))
    assert len(prompts) == 80
    assert prompts[41].token_ids == prompts[1].token_ids
    assert prompts[41].index == 41


@pytest.mark.parametrize(
    "truth", ["3", 3, 2.5, ["3", "three"], {"target": ["Queen"]}, {"inputs": ["1\n"], "fn_name": None}]
)
def test_a_ground_truth_reaches_the_reward_as_it_is(tmp_path: Path, tokenizer: Any, truth: Any) -> None:
    file = write(tmp_path / "a.parquet", reward_model=[{"style": "rule", "ground_truth": truth}])
    assert PromptDataset([file], tokenizer, DataConfig())[0].ground_truth == truth


def test_prompts_are_counted_by_file_and_data_source(file: Path, tmp_path: Path, tokenizer: Any) -> None:
    other = write(tmp_path / "a.parquet")
    prompts = PromptDataset([file, other, file], tokenizer, DataConfig(max_prompt_length=128))
    assert prompts.count_sources() == {(file, "slipway/arithmetic"): 80, (other, "here"): 1}


def test_a_long_prompt_is_refused_dropped_or_truncated(file: Path, tokenizer: Any) -> None:
    whole = PromptDataset([file], tokenizer, DataConfig(max_prompt_length=128))
    lengths = [len(whole[index].token_ids) for index in range(len(whole))]
    limit = sorted(lengths)[20]

    def limited(way: str) -> PromptDataset:
        return PromptDataset([file], tokenizer, DataConfig(max_prompt_length=limit, overlong_prompts=way))

    first = next(index for index, length in enumerate(lengths) if length > limit)
    with pytest.raises(DataError) as caught:
        limited("error")
    assert f"{file}, row {first}: the prompt has {lengths[first]} tokens, data.max_prompt_length is {limit}" in str(
        caught.value
    )
    assert "data.overlong_prompts=filter" in caught.value.hint
    assert len(limited("filter")) == sum(length <= limit for length in lengths)
    assert limited("truncate_left")[first].token_ids == whole[first].token_ids[-limit:]
    assert limited("truncate_right")[first].token_ids == whole[first].token_ids[:limit]
    with pytest.raises(DataError, match="no prompt has at most 2 tokens"):
        PromptDataset([file], tokenizer, DataConfig(max_prompt_length=2, overlong_prompts="filter"))


def test_the_next_run_reads_the_cached_tokens(
    file: Path, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = DataConfig(max_prompt_length=128, cache_dir=tmp_path / "cache")
    first = PromptDataset([file], tokenizer, settings)
    with monkeypatch.context() as patch:
        patch.setattr(dataset, "_tokenised", None)  # would fail if it were called
        again = PromptDataset([file], tokenizer, settings)
    assert [again[index] for index in range(40)] == [first[index] for index in range(40)]
    PromptDataset([file], tokenizer, settings.model_copy(update={"max_prompt_length": 100}))
    assert len(list((tmp_path / "cache").iterdir())) == 2  # other limits, another table


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"reward_model": []}, "no column reward_model; the file has data_source, prompt, extra_info"),
        ({"prompt": []}, "no column prompt"),
        (
            {"reward_model": [{"style": "rule", "ground_truth": None}]},
            "row 0: prompt or reward_model.ground_truth is empty",
        ),
        ({"prompt": [5]}, "row 0: column prompt is neither text nor a list of messages with role and content"),
        ({"prompt": [[{"text": "How many?"}]]}, "row 0: column prompt is neither text nor a list of messages"),
    ],
)
def test_wrong_columns_are_named_with_file_and_row(
    tmp_path: Path, tokenizer: Any, columns: dict[str, list[Any]], words: str
) -> None:
    path = write(tmp_path / "train.parquet", **columns)
    with pytest.raises(DataError) as caught:
        PromptDataset([path], tokenizer, DataConfig())
    assert str(path) in str(caught.value)
    assert words in str(caught.value)
    assert caught.value.hint


QUESTION = {"role": "user", "content": "How many are 1 + 2?"}
LINE = {"data_source": "here", "prompt": [QUESTION], "reward_model": {"ground_truth": "3"}}


def lines(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def saved_by_datasets(folder: Path, file: Path) -> Path:
    """A folder like the one that `datasets.Dataset.save_to_disk` writes, with two data files."""
    folder.mkdir()
    table = pq.read_table(file)
    names = [f"data-0000{part}-of-00002.arrow" for part in range(2)]
    for name, part in zip(names, (table.slice(0, 25), table.slice(25)), strict=True):
        with pa.ipc.new_stream(str(folder / name), table.schema) as writer:
            writer.write_table(part)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    return folder


def test_a_datasets_folder_has_the_prompts_of_the_parquet_file(file: Path, tokenizer: Any, tmp_path: Path) -> None:
    settings = DataConfig(max_prompt_length=128, cache_dir=tmp_path / "cache")
    folder = saved_by_datasets(tmp_path / "saved", file)
    ours, theirs = (PromptDataset([path], tokenizer, settings) for path in (folder, file))
    assert [ours[index] for index in range(len(ours))] == [theirs[index] for index in range(len(theirs))]


def test_a_folder_of_splits_names_them(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(DataError) as caught:
        PromptDataset([tmp_path], tokenizer, DataConfig())
    assert caught.value.hint == f"name one of them: {tmp_path}/train, {tmp_path}/test"


def test_json_lines_end_at_line_feeds_only(tokenizer: Any, tmp_path: Path) -> None:
    question = {"role": "user", "content": "1 +\u2028 2\x85?"}
    path = lines(tmp_path / "train.jsonl", LINE, {**LINE, "prompt": [question]})
    prompts = PromptDataset([path], tokenizer, DataConfig())
    assert [prompt.question for prompt in (prompts[0], prompts[1])] == ["How many are 1 + 2?", "1 +\u2028 2\x85?"]
    assert prompts[1].extra_info == {}


def test_a_json_file_holds_an_array_or_lines(tokenizer: Any, tmp_path: Path) -> None:
    array = tmp_path / "array.json"
    array.write_text(json.dumps([LINE, LINE], indent=1))
    rows = PromptDataset([array, lines(tmp_path / "lines.json", LINE)], tokenizer, DataConfig())
    assert len(rows) == 3


def test_columns_that_parquet_adds_to_messages_are_left_out(tmp_path: Path, tokenizer: Any) -> None:
    """Llama's template looks whether `tool_calls` is there; the first message has it because the second one does."""
    call = {"id": None, "function": {"name": "add", "arguments": {"x": 1, "y": None}}}
    said = {"role": "assistant", "content": "so", "tool_calls": [call]}
    asked = {"role": "user", "content": "How many are 1 + 2?", "tool_calls": None}
    prompts = PromptDataset(
        [write(tmp_path / "calls.parquet", prompt=[[asked, said]])], tokenizer, DataConfig(max_prompt_length=128)
    )
    calls = [{"function": {"name": "add", "arguments": {"x": 1}}}]
    assert prompts[0].messages == [
        {"role": "user", "content": "How many are 1 + 2?"},
        {"role": "assistant", "content": "so", "tool_calls": calls},
    ]


def test_text_parts_are_joined(tokenizer: Any, tmp_path: Path) -> None:
    content = [{"type": "text", "text": "How many "}, {"type": "text", "text": "are 1 + 2?"}]
    path = lines(tmp_path / "train.jsonl", LINE, {**LINE, "prompt": [{"role": "user", "content": content}]})
    prompts = PromptDataset([path], tokenizer, DataConfig())
    assert prompts[1].token_ids == prompts[0].token_ids
    assert prompts[1].messages == [QUESTION]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({**LINE, "reward_model": "3"}, "row 1: column reward_model is str instead of a mapping"),
        ({**LINE, "extra_info": "x"}, "row 1: column extra_info is str instead of a mapping"),
        ({**LINE, "data_source": None}, "row 1: column data_source is NoneType instead of text"),
        ({**LINE, "prompt": json.dumps([QUESTION])}, "row 1: column prompt holds messages as JSON in a text"),
        ({**LINE, "prompt": ["Why?"]}, "row 1: column prompt is neither text nor a list of messages"),
        ({**LINE, "prompt": [{"role": "user", "content": None}]}, "row 1: message 0 of prompt: the content is null"),
        ({**LINE, "prompt": [{"role": 7, "content": "x"}]}, "row 1: message 0 of prompt: the role is int instead of"),
        ({**LINE, "prompt": [{"role": "user", "content": {"a": 1}}]}, "the content is dict instead of text"),
        (
            {**LINE, "prompt": [QUESTION, {"role": "user", "content": [{"type": "image", "image": "a.png"}]}]},
            "row 1: message 1 of prompt: part 0 is of type image",
        ),
        ({**LINE, "images": ["a.png"]}, "row 1: column images is not empty"),
        ({"prompt": [QUESTION]}, "line 2: no column data_source, reward_model; the file has prompt"),
        ([1, 2], "line 2: [1, 2] is not an object with columns"),
    ],
)
def test_a_wrong_row_is_one_error_with_file_and_row(tmp_path: Path, tokenizer: Any, row: object, words: str) -> None:
    path = lines(tmp_path / "train.jsonl", LINE, row)
    with pytest.raises(DataError) as caught:
        PromptDataset([path], tokenizer, DataConfig())
    assert str(path) in str(caught.value)
    assert words in str(caught.value)
    assert caught.value.hint
    assert ("vision" in caught.value.hint) == ("image" in words)


def test_bytes_are_refused_and_lone_surrogates_too(tmp_path: Path, tokenizer: Any) -> None:
    in_bytes = write(tmp_path / "bytes.parquet", prompt=[[{"role": "user", "content": b"How many?"}]])
    with pytest.raises(DataError, match="row 0: message 0 of prompt: the content is bytes instead of text"):
        PromptDataset([in_bytes], tokenizer, DataConfig())
    truth = write(tmp_path / "truth.parquet", reward_model=[{"ground_truth": b"3"}])
    with pytest.raises(DataError, match=r"row 0: reward_model.ground_truth is bytes"):
        PromptDataset([truth], tokenizer, DataConfig())
    half = tmp_path / "half.jsonl"
    half.write_text(json.dumps({**LINE, "prompt": [{"role": "user", "content": "\ud800"}]}) + "\n")
    with pytest.raises(DataError, match="the content is not valid Unicode"):
        PromptDataset([half], tokenizer, DataConfig())


def test_damaged_lines_are_named(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps(LINE) + '\n{"prompt": ')
    with pytest.raises(DataError, match="line 2: not JSON"):
        PromptDataset([path], tokenizer, DataConfig())
    path.write_bytes(b'{"prompt": "\xff"}')
    with pytest.raises(DataError, match="not a readable jsonl"):
        PromptDataset([path], tokenizer, DataConfig())


def test_a_subset_is_the_first_rows_or_a_random_draw_that_the_seed_repeats(file: Path, tokenizer: Any) -> None:
    def questions(subset: Subset) -> list[str]:
        prompts = PromptDataset([file, file], tokenizer, DataConfig(max_prompt_length=128), subset)
        return [prompts[index].question for index in range(len(prompts))]

    every = questions(Subset())
    assert questions(Subset(size=45)) == every[:45]
    assert questions(Subset(size=1000)) == questions(Subset(size=0)) == every
    drawn = questions(Subset(size=30, seed=1))
    assert drawn == questions(Subset(size=30, seed=1)) != questions(Subset(size=30, seed=2))
    assert len(drawn) == 30
    assert Subset(size=3).rows([2, 0, 2]) == [[0, 1], [], [0]]


def test_another_column_may_hold_the_prompt(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "train.parquet", prompt=[], messages=[[{"role": "user", "content": "Why?"}]])
    prompts = PromptDataset([path], tokenizer, DataConfig(prompt_key="messages"))
    assert prompts[0].question == "Why?"


CUSTOM = """
from trainer.data.dataset import Prompt

class Doubles:
    def __init__(self, files, tokenizer, settings):
        self.tokenizer = tokenizer

    def __len__(self):
        return 5

    def __getitem__(self, index):
        token_ids = tuple(self.tokenizer(f"{index}+{index}=")["input_ids"])
        return Prompt(index, token_ids, str(2 * index), "doubles", f"{index}+{index}")

class Words(Doubles):
    def __getitem__(self, index):
        return "a word"
"""


def test_a_custom_dataset_class(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "mine.py"
    path.write_text(CUSTOM)

    def opened(name: str) -> Any:
        return open_dataset([], tokenizer, DataConfig(custom_cls=CustomCode(path=path, name=name)))

    assert opened("Doubles")[3].ground_truth == "6"
    with pytest.raises(DataError, match="gives str, not a Prompt"):
        opened("Words")
    with pytest.raises(ConfigError) as caught:
        opened("Double")
    assert caught.value.hint == "set data.custom_cls.name=Doubles"


def test_a_tokenizer_without_a_chat_template_is_refused(file: Path) -> None:
    tokenizer = build_tokenizer(["How many are 1 + 2? #### 3"])
    tokenizer.chat_template = None
    with pytest.raises(DataError) as caught:
        PromptDataset([file], tokenizer, DataConfig(max_prompt_length=128))
    assert "the model's chat template rejects these messages" in str(caught.value)
