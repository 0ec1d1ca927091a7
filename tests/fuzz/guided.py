"""Inputs that reach new code: bytes of libFuzzer decide what a target's generator draws.

`python -m tests.fuzz.guided ROOM TARGET SECONDS [FILE…]` fuzzes one target, or repeats the findings in these files.
Atheris: https://github.com/google/atheris
"""

import importlib
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from random import Random

ROOT = Path(__file__).parents[2]
CODE = ("buildkit", "entrypoints", "trainer")
EXECUTED = re.compile(r"^stat::number_of_executed_units:\s*(\d+)", re.MULTILINE)
LONGEST_INPUT, HANG, MEMORY_MIB = 4096, 25, 4096


class Drawn(Random):
    """A generator whose first random bits are given. The others follow from them."""

    def __init__(self, bits: bytes) -> None:
        super().__init__(bits)
        self._bits, self._at = bits, 0

    def getrandbits(self, k: int, /) -> int:
        size = (k + 7) // 8
        drawn = self._bits[self._at : self._at + size]
        self._at += size
        return int.from_bytes(drawn, "big") >> (size * 8 - k) if len(drawn) == size else super().getrandbits(k)

    def random(self) -> float:
        return self.getrandbits(53) * 2.0**-53


def guided(room: str, target: str, seconds: float) -> tuple[int, int]:
    """Fuzzes in a process of its own, which ends at the first finding: the number of inputs, and that of findings."""
    command = [sys.executable, "-m", __spec__.name, room, target, str(int(seconds))]
    ended = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, errors="replace")
    if ended.returncode != 0:
        sys.stderr.write(ended.stderr[-6000:])
    return sum(map(int, EXECUTED.findall(ended.stderr))), int(ended.returncode != 0)


def main() -> None:
    import atheris

    room, name, seconds, *files = sys.argv[1:]
    with atheris.instrument_imports(include=list(CODE)):
        targets = importlib.import_module(f"tests.fuzz.{room}").TARGETS
    target = next(target for target in targets if target.name == name)
    options = [f"-max_total_time={seconds}", "-print_final_stats=1", f"-max_len={LONGEST_INPUT}", f"-timeout={HANG}"]
    options += ["-len_control=0", f"-artifact_prefix={tempfile.mkdtemp(prefix='fuzz-')}/"]
    atheris.Setup(
        [sys.argv[0], *options, f"-rss_limit_mb={MEMORY_MIB}", *files], lambda bits: target.attempt(Drawn(bits))
    )
    atheris.Fuzz()


if __name__ == "__main__":
    main()
