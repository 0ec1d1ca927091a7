"""Published data sets as files that the trainer reads: from a hub, from a local copy, and made up."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.trainer.fake_hub import fake_hub
from trainer.config.sections.data import DataConfig
from trainer.config.sections.reward import RewardConfig
from trainer.data.dataset import PromptDataset
from trainer.data.preferences import read_pairs
from trainer.data.published.origins import Local, Origin, Synthetic
from trainer.data.published.table import DATASETS
from trainer.data.published.writing import write_dataset
from trainer.errors import DataError
from trainer.models.small import build_tokenizer

ROOT = Path(__file__).parents[3]
# Rows as the hub's repositories have them, and what the trainer shall get as the truth.
TESTS = {"inputs": ["1 2\n"], "outputs": ["3\n"]}
ROWS: Mapping[str, tuple[dict[str, dict[str, Any]], str]] = {
    "gsm8k": (
        {
            "main/train-00000-of-00001.parquet": {"question": "How many?", "answer": "Two and two.\n#### 1,004"},
            "main/test-00000-of-00001.parquet": {"question": "How few?", "answer": "#### 3"},
            "socratic/train-00000-of-00001.parquet": {"question": "How?", "answer": "#### 5"},
        },
        "1004",
    ),
    "math": (
        {
            "data/train-00000-of-00001.parquet": {"problem": "Half?", "solution": "It is $\\boxed{\\frac{1}{2}}$."},
            "data/test-00000-of-00001.parquet": {"problem": "All?", "solution": "\\boxed{1}"},
        },
        "\\frac{1}{2}",
    ),
    "dapo": (
        {
            "all/train-00000-of-00001.parquet": {"prompt": "How many?", "solution": "34"},
            "data/train-00000-of-00001.parquet": {"problem": "How few?", "answer": "025"},
        },
        "34",
    ),
    "code": (
        {
            "taco/train-00000-of-00002.parquet": {"problem": "Add.", "tests": json.dumps(TESTS)},
            "codeforces/test-00000-of-00001.parquet": {
                "problem": "Add.",
                "tests": json.dumps([{"input": "1 2\n", "output": "3\n"}]),
            },
        },
        json.dumps(TESTS),
    ),
    "preferences": (
        {
            f"data/{split}_prefs-00000-of-00001.parquet": {
                "prompt": "Who?",
                "chosen": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "I."}],
                "rejected": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "You."}],
            }
            for split in ("train", "test")
        },
        "I.",
    ),
}


def write_table(path: Path, *rows: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


def copy_of(name: str, directory: Path) -> Path:
    """A clone of the repositories of a data set, each with a row."""
    for file, row in ROWS[name][0].items():
        write_table(directory / file, row)
    return directory


def written(name: str, origin: Origin, directory: Path) -> list[list[dict[str, Any]]]:
    paths = list(write_dataset(DATASETS[name], origin, directory))
    assert [path.name for path in paths] == ["train.parquet", "test.parquet"]
    return [pq.read_table(path).to_pylist() for path in paths]


def trainer(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(
        [sys.executable, "-m", "trainer", "data", *arguments], capture_output=True, text=True, env=environment
    )


@pytest.mark.parametrize("name", DATASETS)
def test_a_local_copy_has_the_truth_that_its_rule_reads(name: str, tmp_path: Path) -> None:
    (train,), (test,) = written(name, Local((copy_of(name, tmp_path / "copy"),)), tmp_path)
    assert train["reward_model"]["ground_truth"] == ROWS[name][1]
    assert (train["extra_info"]["split"], test["extra_info"]["split"]) == ("train", "test")
    for row in (train, test):
        rule = RewardConfig().rule_for(row["data_source"])
        assert (rule.name if rule else "") == DATASETS[name].rule


@pytest.mark.parametrize("name", DATASETS)
def test_synthetic_rows_say_so_and_follow_from_the_seed(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        first = written(name, Synthetic(40, seed=1), tmp_path / "a")
    assert caplog.text.count("SYNTHETIC") == 2
    assert first == written(name, Synthetic(40, seed=1), tmp_path / "b")
    assert first != written(name, Synthetic(40, seed=2), tmp_path / "c")
    train, test = ([row["extra_info"]["question"] for row in rows] for rows in first)
    assert (len(train), len(test), len({*train, *test})) == (40, 5, 45)
    assert {row["data_source"] for rows in first for row in rows} == {f"slipway/synthetic-{name}"}
    rule = RewardConfig().rule_for(f"slipway/synthetic-{name}")
    assert (rule.name if rule else "") == DATASETS[name].rule


@pytest.mark.parametrize("name", DATASETS)
def test_the_trainer_reads_what_was_written(name: str, tmp_path: Path) -> None:
    written(name, Synthetic(8), tmp_path)
    tokenizer, files = build_tokenizer(["How many are 1 + 2? #### 3"]), [tmp_path / "train.parquet"]
    settings = DataConfig(max_prompt_length=1024, max_response_length=64)
    assert len(PromptDataset(files, tokenizer, settings)) == 8
    if name == "preferences":
        assert len(read_pairs(files, tokenizer, settings)) == 8


def test_responses_and_pairs_may_be_messages(tmp_path: Path) -> None:
    written("preferences", Local((copy_of("preferences", tmp_path / "copy"),)), tmp_path)
    tokenizer = build_tokenizer(["Who? I. You."])
    (pair,) = read_pairs([tmp_path / "train.parquet"], tokenizer, DataConfig(max_prompt_length=64))
    assert "I." in tokenizer.decode(pair.chosen.response)
    assert "You." in tokenizer.decode(pair.rejected.response)


def test_files_are_test_files_by_name_and_columns_may_have_other_names(tmp_path: Path) -> None:
    train = write_table(tmp_path / "mine.parquet", {"body": "How many?", "row": {"worked": "#### 4"}})
    test = tmp_path / "mine-test.jsonl"
    test.write_text(json.dumps({"body": "How few?", "row": {"worked": "#### 2"}}) + "\n")
    origin = Local((test, train), {"question": "body", "answer": "row.worked"})
    truths = [
        [row["reward_model"]["ground_truth"] for row in rows] for rows in written("gsm8k", origin, tmp_path / "out")
    ]
    assert truths == [["4"], ["2"]]


def test_missing_columns_are_named_with_the_option_that_fits(tmp_path: Path) -> None:
    path = write_table(tmp_path / "train.parquet", {"question": "How many?", "solution": "#### 4", "level": 1})
    with pytest.raises(DataError) as caught:
        list(write_dataset(DATASETS["gsm8k"], Local((path,)), tmp_path / "out"))
    assert str(caught.value) == (
        f"{path}: no column answer; the file has question, solution, level; data gsm8k needs question, answer"
    )
    assert caught.value.hint == "try --column answer=solution"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "no such file"), (b"not parquet", "not a readable parquet file"), (b"", "not a readable parquet file")],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None, words: str) -> None:
    path = tmp_path / "train.parquet"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=words) as caught:
        list(write_dataset(DATASETS["gsm8k"], Local((path,)), tmp_path / "out"))
    assert str(path) in str(caught.value)


def test_a_folder_without_a_split_lists_its_files(tmp_path: Path) -> None:
    write_table(tmp_path / "copy" / "rows.parquet", {"question": "How many?", "answer": "#### 4"})
    with pytest.raises(DataError, match=r"no train files like .*; it has rows\.parquet"):
        list(write_dataset(DATASETS["gsm8k"], Local((tmp_path / "copy",)), tmp_path))


def test_a_split_in_several_folders_is_refused(tmp_path: Path) -> None:
    for folder in ("easy", "hard"):
        write_table(tmp_path / folder / "train.parquet", {"question": "How many?", "answer": "#### 4"})
    with pytest.raises(DataError, match="train files in several folders: easy, hard"):
        list(write_dataset(DATASETS["gsm8k"], Local((tmp_path,)), tmp_path))


def test_the_output_never_replaces_the_input(tmp_path: Path) -> None:
    path = write_table(tmp_path / "train.parquet", {"question": "How many?", "answer": "#### 4"})
    with pytest.raises(DataError, match="the output is the input"):
        list(write_dataset(DATASETS["gsm8k"], Local((path,)), tmp_path))
    assert pq.read_schema(path).names == ["question", "answer"]


def test_rows_without_an_answer_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    good, bad = {"question": "How many?", "answer": "#### 4"}, {"question": "How many?", "answer": "four"}
    path = write_table(tmp_path / "train.parquet", bad, good, bad)
    (out,) = write_dataset(DATASETS["gsm8k"], Local((path,)), tmp_path / "out")
    assert [row["extra_info"]["index"] for row in pq.read_table(out).to_pylist()] == [1]
    assert "left out 2 of 3 rows; row 0: the answer does not end in `#### N`" in caplog.text
    write_table(path, bad)
    with pytest.raises(DataError, match="no row can be used; row 0: the answer does not end in"):
        list(write_dataset(DATASETS["gsm8k"], Local((path,)), tmp_path / "out"))


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"problem": "Add.", "tests": "no JSON"}, "the tests are not JSON"),
        ({"problem": "Add.", "tests": json.dumps({"inputs": [], "outputs": []})}, "no inputs"),
        ({"problem": "Add.", "tests": json.dumps({"inputs": ["1"], "outputs": ["1", "2"]})}, "not as many outputs"),
        ({"problem": "Add.", "tests": json.dumps([{"input": "1", "testtype": "functional"}])}, "do not name"),
        ({"problem": " ", "tests": json.dumps(TESTS)}, "the question is empty"),
    ],
)
def test_a_program_needs_tests(row: dict[str, Any], reason: str, tmp_path: Path) -> None:
    path = write_table(tmp_path / "train.parquet", row)
    with pytest.raises(DataError, match=reason):
        list(write_dataset(DATASETS["code"], Local((path,)), tmp_path / "out"))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"rejected": "I."}, "chosen and rejected are the same"),
        ({"chosen": " "}, "a response is empty"),
        ({"chosen": [{"role": "assistant", "content": ""}]}, "a response is empty"),
        ({"prompt": None}, "the prompt or a response is empty"),
        ({"rejected": ["You."]}, "neither text nor a list of messages"),
    ],
)
def test_a_pair_needs_two_different_responses(changed: dict[str, Any], reason: str, tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps({"prompt": "Who?", "chosen": "I.", "rejected": "You.", **changed}) + "\n")
    with pytest.raises(DataError, match=reason):
        list(write_dataset(DATASETS["preferences"], Local((path,)), tmp_path / "out"))


def test_a_right_answer_to_a_synthetic_question_has_the_full_reward(tmp_path: Path) -> None:
    answers = {
        "gsm8k": lambda row: row["extra_info"]["answer"],
        "math": lambda row: row["extra_info"]["answer"],
        "dapo": lambda row: f"Answer: {row['extra_info']['answer']}",
    }
    for name, answer in answers.items():
        row = written(name, Synthetic(4), tmp_path / name)[0][0]
        score = rule_of(row)(answer(row), row["reward_model"]["ground_truth"])
        assert (score["score"] if isinstance(score, Mapping) else score) == 1.0


def rule_of(row: dict[str, Any]) -> Any:
    rule = RewardConfig().rule_for(row["data_source"])
    assert rule
    return rule.score


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--synthetic", "4", "--hub", "me/mine"), "--hub and --synthetic name different rows"),
        (("--seed", "1"), "--seed changes nothing without --synthetic"),
        (("--synthetic", "4", "--column", "answer=a"), "--column changes nothing with --synthetic"),
        (("--column", "reply=a"), "--column reply=a: not a part of a row of gsm8k"),
    ],
)
def test_options_that_contradict_each_other_are_refused(arguments: tuple[str, ...], message: str) -> None:
    done = trainer("gsm8k", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Environment variables that name a hub with GSM8K, a data set of somebody else, and a gated copy."""
    for repository in ("openai/gsm8k", "gated/gsm8k"):
        copy_of("gsm8k", tmp_path / "hub" / repository)
    for split in ("train", "test"):
        row = {"question": "How many?", "answer": "#### 8"}
        write_table(tmp_path / "hub" / "me" / "mine" / f"{split}.parquet", row)
    with fake_hub(tmp_path / "hub", tmp_path / "cache") as variables:
        yield variables


@pytest.mark.parametrize(("arguments", "truth"), [((), "1004"), (("--hub", "me/mine"), "8")])
def test_a_data_set_comes_from_a_fake_hub_that_hf_endpoint_names(
    hub: dict[str, str], tmp_path: Path, arguments: tuple[str, ...], truth: str
) -> None:
    done = trainer("gsm8k", *arguments, "--output", str(tmp_path / "out"), **hub)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(tmp_path / "out" / f"{split}.parquet") for split in ("train", "test")]
    (row,) = pq.read_table(tmp_path / "out" / "train.parquet").to_pylist()
    assert row["reward_model"]["ground_truth"] == truth


@pytest.mark.parametrize(
    ("repository", "message", "hint"),
    [
        ("gated/gsm8k", "gated/gsm8k: the data set is gated", "set HF_TOKEN"),
        ("nobody/nothing", "nobody/nothing: no such data set on the hub", "--from"),
    ],
)
def test_a_fake_hub_that_refuses_is_one_message_with_the_next_step(
    hub: dict[str, str], tmp_path: Path, repository: str, message: str, hint: str
) -> None:
    done = trainer("gsm8k", "--hub", repository, "--output", str(tmp_path / "out"), **hub)
    assert (done.returncode, done.stdout) == (3, "")
    assert f"error: {message}" in done.stderr
    assert hint in done.stderr.partition("hint: ")[2]
    assert "Traceback" not in done.stderr


def test_a_hub_out_of_reach_is_named(tmp_path: Path) -> None:
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    done = trainer("gsm8k", "--output", str(tmp_path / "out"), **nowhere)
    assert done.returncode == 3
    assert "openai/gsm8k: the Hugging Face hub at http://127.0.0.1:9 did not provide it" in done.stderr
