"""`python -m verl.trainer.main_generation`: says what to use instead."""

from trainer.main_ppo import run

if __name__ == "__main__":
    run("verl.trainer.main_generation")
