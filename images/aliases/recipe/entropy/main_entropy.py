"""`python -m recipe.entropy.main_entropy KEY=VALUE…`."""

from trainer.main_ppo import run

if __name__ == "__main__":
    run("recipe.entropy.main_entropy")
