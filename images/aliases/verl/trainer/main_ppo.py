"""`python -m verl.trainer.main_ppo KEY=VALUE…`."""

from trainer.main_ppo import run

if __name__ == "__main__":
    run()
