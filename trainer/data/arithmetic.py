"""Word problems about small sums, shaped like GSM8K: something to learn within minutes and to check by rule.

A question is a template filled with a name, a thing and two numbers. Train and validation questions are drawn together
without replacement, so no held-out question is ever trained on; their sums do recur in other words.

The demonstrations are what a warm start learns from: worked answers by someone who mostly forgets to carry. A model
that imitates them knows the form, is often wrong, and sometimes right: just what PPO can improve.
"""

import random
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
SMALLEST = 2  # "1 apples" reads badly


def write_arithmetic(
    directory: Path, train: int, validation: int, max_number: int, dropped_carries: float, seed: int
) -> tuple[Path, Path, Path]:
    """Writes `train.parquet`, `demonstrations.parquet` and `validation.parquet` and returns their paths.

    The numbers added are 2 … `max_number`. Train and demonstrations hold the same `train` questions; of the
    demonstrated sums that need a carry, the share `dropped_carries` is worked out without it. Raises DataError if there
    are not that many different questions.
    """
    if max_number < SMALLEST:
        raise DataError(f"numbers up to {max_number} asked for", hint=f"the smallest number in use is {SMALLEST}")
    indices = _draw(train + validation, max_number, seed)
    trained, held_out = indices[:train], indices[train:]
    dice = random.Random(f"{seed}/carries")
    train_path, demonstrations_path, validation_path = (
        directory / f"{name}.parquet" for name in ("train", "demonstrations", "validation")
    )
    write_rows([_row(i, n, "train", max_number, True) for n, i in enumerate(trained)], train_path)
    write_rows(
        [_row(i, n, "train", max_number, dice.random() >= dropped_carries) for n, i in enumerate(trained)],
        demonstrations_path,
    )
    write_rows([_row(i, n, "validation", max_number, True) for n, i in enumerate(held_out)], validation_path)
    return train_path, demonstrations_path, validation_path


def add_without_carry(a: int, b: int) -> int:
    """Adds digit by digit and forgets every carry: 7 + 5 = 2, 17 + 5 = 12."""
    if a == 0 or b == 0:
        return a + b
    return 10 * add_without_carry(a // 10, b // 10) + (a + b) % 10


def _draw(count: int, max_number: int, seed: int) -> list[int]:
    """Different places in the list of all questions."""
    size = len(TEMPLATES) * len(NAMES) * len(THINGS) * (max_number - SMALLEST + 1) ** 2
    if count > size:
        raise DataError(
            f"{count} questions asked for, only {size} different ones exist with numbers up to {max_number}",
            hint="ask for fewer questions or for larger numbers",
        )
    return random.Random(seed).sample(range(size), count)


def _row(place: int, number: int, split: str, max_number: int, carries: bool) -> Row:
    question, a, b = _problem(place, max_number)
    stated = a + b if carries else add_without_carry(a, b)
    return {
        "data_source": "slipway/arithmetic",
        "prompt": [{"role": "user", "content": question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(a + b)},
        "extra_info": {
            "split": split,
            "index": number,
            "question": question,
            "answer": f"{a}+{b}={stated}\n#### {stated}",
        },
    }


def _problem(place: int, max_number: int) -> tuple[str, int, int]:
    """The question at one place in the list of all questions, and the two numbers in it."""
    numbers = max_number - SMALLEST + 1
    place, first = divmod(place, numbers)
    place, second = divmod(place, numbers)
    place, thing = divmod(place, len(THINGS))
    template, name = divmod(place, len(NAMES))
    a, b = first + SMALLEST, second + SMALLEST
    return TEMPLATES[template].format(name=NAMES[name], things=THINGS[thing], a=a, b=b), a, b
