"""Word problems about small sums, shaped like GSM8K: something to learn within minutes and to check by rule.

A question is a template filled with a name, a thing and two numbers. Train and validation questions are drawn together
without replacement, so no held-out question is ever trained on; their sums do recur in other words.
"""

import random
from collections.abc import Iterator
from pathlib import Path

from trainer.data.schema import Row, write_rows
from trainer.errors import DataError

TEMPLATES = (
    "{name} has {a} {things} and finds {b} more. How many {things} does {name} have?",
    "{name} buys {a} {things} today and {b} tomorrow. How many {things} is that?",
    "There are {a} {things} on the table. {name} adds {b}. How many {things} are there?",
    "{name} counts {a} red {things} and {b} blue {things}. How many {things} in all?",
    "{name} had {a} {things} and was given {b}. How many {things} now?",
    "One box holds {a} {things}, another {b}. How many {things} does {name} see?",
)
NAMES = ("Ann", "Ben", "Cara", "Dan", "Eve", "Finn", "Gina", "Hugo", "Iris", "Jon", "Kim", "Leo")
THINGS = ("apples", "books", "coins", "cups", "eggs", "keys", "nuts", "pens", "shells", "stamps", "stones", "toys")


def write_arithmetic(directory: Path, train: int, validation: int, max_number: int, seed: int) -> tuple[Path, Path]:
    """Writes `train.parquet` and `validation.parquet` with this many questions each and returns their paths.

    The numbers added are 1 … `max_number`. Raises DataError if there are not that many different questions.
    """
    indices = _draw(train + validation, max_number, seed)
    paths = directory / "train.parquet", directory / "validation.parquet"
    for path, drawn in zip(paths, (indices[:train], indices[train:]), strict=True):
        write_rows(list(_rows(drawn, path.stem, max_number)), path)
    return paths


def _draw(count: int, max_number: int, seed: int) -> list[int]:
    """Different places in the list of all questions."""
    size = len(TEMPLATES) * len(NAMES) * len(THINGS) * max_number**2
    if count > size:
        raise DataError(
            f"{count} questions asked for, only {size} different ones exist with numbers up to {max_number}",
            hint="ask for fewer questions or for larger numbers",
        )
    return random.Random(seed).sample(range(size), count)


def _rows(indices: list[int], split: str, max_number: int) -> Iterator[Row]:
    for row_index, index in enumerate(indices):
        question, answer, total = _problem(index, max_number)
        yield {
            "data_source": "slipway/arithmetic",
            "prompt": [{"role": "user", "content": question}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(total)},
            "extra_info": {"split": split, "index": row_index, "question": question, "answer": answer},
        }


def _problem(index: int, max_number: int) -> tuple[str, str, int]:
    """Question, worked answer and sum at one place in the list of all questions."""
    index, first = divmod(index, max_number)
    index, second = divmod(index, max_number)
    index, thing = divmod(index, len(THINGS))
    template, name = divmod(index, len(NAMES))
    a, b = first + 1, second + 1
    question = TEMPLATES[template].format(name=NAMES[name], things=THINGS[thing], a=a, b=b)
    return question, f"{a}+{b}={a + b}\n#### {a + b}", a + b
