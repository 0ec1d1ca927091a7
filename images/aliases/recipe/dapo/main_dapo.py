"""`python -m recipe.dapo.main_dapo KEY=VALUE…`."""

from trainer.main_ppo import run

if __name__ == "__main__":
    run("recipe.dapo.main_dapo")
