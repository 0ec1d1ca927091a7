"""`python -m trainer`."""

from trainer.cli import run_process

run_process()
