"""`python -m verl.experimental.one_step_off_policy.main_ppo KEY=VALUE…`."""

from trainer.main_ppo import run

if __name__ == "__main__":
    run("verl.experimental.one_step_off_policy.main_ppo")
