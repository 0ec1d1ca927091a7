"""Prompts from the published GSM8K files."""

from pathlib import Path
from typing import Any

from trainer.data.answers import final_answer
from trainer.data.formats.files import read_rows
from trainer.data.formats.schema import PromptRow, write_rows
from trainer.errors import DataError

_HINT = "the input is GSM8K as published: parquet or jsonl with question and answer, each answer ending in `#### N`"
_INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'


def convert_gsm8k(source: Path, output: Path | None = None) -> Path:
    """Writes the questions of a GSM8K file as chat prompts and returns the path written.

    The file name determines the split (`test` or `train`). Raises DataError if the file is missing, damaged or lacks a
    question, an answer or the answer's `#### N`.
    """
    output = output or source.with_name(f"{source.stem}.prompts.parquet")
    if output.resolve() == source.resolve():
        raise DataError(f"{output}: the output is the input", hint="name another --output")
    records = read_rows(source, ("question", "answer"), _HINT)
    split = "test" if "test" in source.stem else "train"
    write_rows([_row(source, number, record, split) for number, record in enumerate(records)], output)
    return output


def _row(source: Path, number: int, record: dict[str, Any], split: str) -> PromptRow:
    question, answer = record.get("question"), record.get("answer")
    if not isinstance(question, str) or not isinstance(answer, str):
        raise DataError(f"{source}, row {number}: no question or no answer", hint=_HINT)
    truth = final_answer(answer)
    if truth is None:
        raise DataError(f"{source}, row {number}: the answer does not end in `#### N`", hint=_HINT)
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{question} {_INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": split, "index": number, "question": question, "answer": answer},
    }
