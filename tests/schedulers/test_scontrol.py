"""Our host lists compared with Slurm's own parser."""

import random
import subprocess

from entrypoints.hostlist import compress, expand

EXPRESSIONS = 20_000
BATCH = 500
"""Expressions per call of scontrol, which prints at most 64 Ki names."""
BETWEEN = "between-two-expressions"


def random_expression(dice: random.Random) -> str:
    """A host list as Slurm writes it: names with up to three brackets and no suffix after one."""
    items = []
    for _ in range(dice.randint(1, 3)):
        text = "".join(dice.choices("abnrx-", k=dice.randint(1, 4))).strip("-") or "n"
        brackets = dice.choices((0, 1, 2, 3), weights=(4, 10, 3, 1))[0]
        for level in range(brackets):
            text += (
                ("-r" if level else "")
                + "["
                + ",".join(random_range(dice, brackets) for _ in range(dice.randint(1, 3)))
                + "]"
            )
        items.append(text if brackets else text + str(dice.randint(0, 999)).zfill(dice.randint(1, 4)))
    return ",".join(items)


def random_range(dice: random.Random, brackets: int) -> str:
    low = dice.choice((0, 1, dice.randint(0, 120), dice.randint(0, 99_999)))
    width = dice.choice((1, 1, 2, 3, 5))
    span = dice.choice((0, 0, dice.randint(1, (12, 6, 3)[brackets - 1])))
    return f"{low:0{width}d}" + (f"-{low + span:0{width}d}" if span else "")


def test_equals_scontrol_on_random_expressions(scontrol: tuple[str, dict[str, str]]) -> None:
    program, environment = scontrol
    dice = random.Random(20_261_121)
    seen = 0
    while seen < EXPRESSIONS:
        batch = [random_expression(dice) for _ in range(BATCH)]
        seen += len(batch)
        printed = subprocess.run(
            [program, "show", "hostnames", f",{BETWEEN},".join(batch)], env=environment, capture_output=True, text=True
        )
        assert printed.returncode == 0, printed.stderr
        theirs = [part.split() for part in printed.stdout.split(BETWEEN)]
        assert len(theirs) == len(batch)
        wrong = [(text, names) for text, names in zip(batch, theirs, strict=True) if expand(text) != names]
        assert not wrong, wrong[0]
    assert seen == EXPRESSIONS


def test_scontrol_expands_our_compressed_lists(scontrol: tuple[str, dict[str, str]]) -> None:
    program, environment = scontrol
    dice = random.Random(7)
    for _ in range(50):
        names = [name for _ in range(5) for name in expand(random_expression(dice))]
        printed = subprocess.run(
            [program, "show", "hostnames", compress(names)], env=environment, capture_output=True, text=True, check=True
        )
        assert printed.stdout.split() == names
