"""`python -m recipe.partial_rollout.main_ppo KEY=VALUE…`."""

from trainer.main_ppo import run

if __name__ == "__main__":
    run("recipe.partial_rollout.main_ppo")
