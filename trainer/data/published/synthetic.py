"""Rows in the form of published data sets, made up from a seed: small problems to try a recipe without a network."""

import json
import random
from collections.abc import Iterator

from trainer.data.arithmetic import pairs as arithmetic_pairs
from trainer.data.arithmetic import worked_sums
from trainer.data.published.conversion import Parts
from trainer.errors import DataError

MAX_NUMBER = 99  # in sums and pairs
_NUMBERS = range(2, 100)  # of products
_SHAPES = ("{a} \\cdot {b} + {c}", "{c} + {a} \\cdot {b}")
_STEPS = ("plus {k}", "minus {k}", "times {k}")
_TESTS = 4  # of a program


def sums(count: int, seed: int) -> list[Parts]:
    """Word problems about sums, as GSM8K writes them."""
    return [{"question": question, "answer": answer} for question, answer in worked_sums(count, MAX_NUMBER, seed)]


def results(count: int, seed: int) -> list[Parts]:
    """Products and sums, with the plain result."""
    return [{"question": question, "answer": str(result)} for question, result in _products(count, seed)]


def boxed_results(count: int, seed: int) -> list[Parts]:
    """The same with a boxed result, as MATH writes it."""
    return [
        {"question": question, "answer": f"The result is $\\boxed{{{result}}}$."}
        for question, result in _products(count, seed)
    ]


def programs(count: int, seed: int) -> list[Parts]:
    """Programs that do something to the sum of two integers, with tests on standard input."""
    rows, generator = [], random.Random(f"{seed}/tests")
    for place in _places(count, len(_STEPS) * 10_000, seed):
        number, step = divmod(place, len(_STEPS))
        number += 2
        given = [(generator.randrange(1000), generator.randrange(1000)) for _ in range(_TESTS)]
        wanted = [(a + b + number, a + b - number, (a + b) * number)[step] for a, b in given]
        tests = {"inputs": [f"{a} {b}\n" for a, b in given], "outputs": [f"{value}\n" for value in wanted]}
        task = _STEPS[step].format(k=number)
        question = f"A line holds two integers. Print their sum {task}."
        rows.append({"question": question, "tests": json.dumps(tests)})
    return rows


def pairs(count: int, seed: int) -> list[Parts]:
    """Word problems about sums with a right and a wrong answer."""
    return [dict(pair) for pair in arithmetic_pairs(count, MAX_NUMBER, seed)]


def _products(count: int, seed: int) -> Iterator[tuple[str, int]]:
    numbers = len(_NUMBERS)
    for place in _places(count, len(_SHAPES) * numbers**3, seed):
        place, a = divmod(place, numbers)
        place, b = divmod(place, numbers)
        shape, c = divmod(place, numbers)
        a, b, c = _NUMBERS[a], _NUMBERS[b], _NUMBERS[c]
        yield f"Compute ${_SHAPES[shape].format(a=a, b=b, c=c)}$.", a * b + c


def _places(count: int, size: int, seed: int) -> list[int]:
    """Distinct positions in a list of `size` problems."""
    if count > size:
        raise DataError(f"there are only {size} different problems, not {count}", hint="ask for fewer rows")
    return random.Random(seed).sample(range(size), count)
