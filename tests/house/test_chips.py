"""Trainer and launch share no code, so each has a table of chips. Both must say the same."""

from entrypoints.host.chips import CHIPS
from trainer.planning.chips import DENSE_BF16_TFLOPS


def test_both_tables_of_chips_agree() -> None:
    assert [(chip.names, chip.matrix) for chip in CHIPS] == list(DENSE_BF16_TFLOPS)
