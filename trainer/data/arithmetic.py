"""Word problems about small sums in the format of GSM8K: learnable within minutes and checkable by rule.

A question is a template filled with a name, a thing and two numbers. Training and validation questions are drawn
together without replacement, so training never sees a held-out question; the same sums do occur in other words.

The demonstrations are worked answers by a teacher who mostly forgets to carry. A model that imitates them knows the
format and is sometimes right. PPO can improve such a model, because it rewards only right results.
"""

import random
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.errors import DataError

if TYPE_CHECKING:
    from trainer.data.formats.schema import PromptRow

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
SMALLEST = 2  # "1 apples" reads badly


def write_arithmetic(
    directory: Path, train: int, validation: int, max_number: int, dropped_carries: float, seed: int
) -> tuple[Path, ...]:
    """Writes `train.parquet`, `demonstrations.parquet` and `validation.parquet` and returns their paths.

    The summands are 2 … `max_number`. `train` and `demonstrations` contain the same `train` questions. Of the
    demonstrated sums that need a carry, the share `dropped_carries` omits it. Raises DataError if there are too few
    different questions.
    """
    from trainer.data.formats.schema import write_rows  # pyarrow, which the command line's help does without

    if max_number < SMALLEST:
        raise DataError(f"no numbers up to {max_number}", hint=f"the smallest number in use is {SMALLEST}")
    places = _draw(train + validation, max_number, seed)
    uniforms = random.Random(f"{seed}/carries")
    sloppy = [uniforms.random() < dropped_carries for _ in range(train)]
    files = {
        "train": _rows("train", places[:train], max_number, [False] * train),
        "demonstrations": _rows("train", places[:train], max_number, sloppy),
        "validation": _rows("validation", places[train:], max_number, [False] * validation),
    }
    for name, rows in files.items():
        write_rows(rows, directory / f"{name}.parquet")
    return tuple(directory / f"{name}.parquet" for name in files)


def worked_sums(count: int, max_number: int, seed: int) -> list[tuple[str, str]]:
    """Different questions with their worked answers, all of them right."""
    problems = [_problem(place, max_number) for place in _draw(count, max_number, seed)]
    return [(question, _worked(a, b, a + b)) for question, a, b in problems]


def pairs(count: int, max_number: int, seed: int) -> list[dict[str, str]]:
    """Different questions as `prompt`, with the right answer as `chosen` and a wrong one as `rejected`.

    The wrong one lacks the carry, or has one too many if there is nothing to carry.
    """
    return [_preference(*_problem(place, max_number)) for place in _draw(count, max_number, seed)]


def _preference(question: str, a: int, b: int) -> dict[str, str]:
    wrong = add_without_carry(a, b)
    wrong = a + b + 1 if wrong == a + b else wrong
    return {"prompt": question, "chosen": _worked(a, b, a + b), "rejected": _worked(a, b, wrong)}


def _worked(a: int, b: int, stated: int) -> str:
    return f"{a}+{b}={stated}\n#### {stated}"


def add_without_carry(a: int, b: int) -> int:
    """The sum digit by digit without any carry: 7 + 5 = 2, 17 + 5 = 12."""
    if a == 0 or b == 0:
        return a + b
    return 10 * add_without_carry(a // 10, b // 10) + (a + b) % 10


def _draw(count: int, max_number: int, seed: int) -> list[int]:
    """Distinct positions in the list of all questions."""
    size = len(TEMPLATES) * len(NAMES) * len(THINGS) * (max_number - SMALLEST + 1) ** 2
    if count > size:
        raise DataError(
            f"there are only {size} different questions with numbers up to {max_number}, not {count}",
            hint="ask for fewer questions or for larger numbers",
        )
    return random.Random(seed).sample(range(size), count)


def _rows(split: str, places: list[int], max_number: int, sloppy: list[bool]) -> "list[PromptRow]":
    problems = [_problem(place, max_number) for place in places]
    return [
        _row(split, index, *problem, drops) for index, (problem, drops) in enumerate(zip(problems, sloppy, strict=True))
    ]


def _row(split: str, index: int, question: str, a: int, b: int, drops_carries: bool) -> "PromptRow":
    stated = add_without_carry(a, b) if drops_carries else a + b
    answer = _worked(a, b, stated)
    return {
        "data_source": "slipway/arithmetic",
        "prompt": [{"role": "user", "content": question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(a + b)},
        "extra_info": {"split": split, "index": index, "question": question, "answer": answer},
    }


def _problem(place: int, max_number: int) -> tuple[str, int, int]:
    """The question at a position in the list of all questions, and its two numbers."""
    numbers = max_number - SMALLEST + 1
    place, first = divmod(place, numbers)
    place, second = divmod(place, numbers)
    place, thing = divmod(place, len(THINGS))
    template, name = divmod(place, len(NAMES))
    a, b = first + SMALLEST, second + SMALLEST
    return TEMPLATES[template].format(name=NAMES[name], things=THINGS[thing], a=a, b=b), a, b
