"""`python -m trainer.main_ppo KEY=VALUE…`: verl's launch lines, with verl's defaults."""

import sys

from trainer.cli import main

main(["train", "--config", "verl", *sys.argv[1:]])
