"""`python -m verl.trainer.sft_trainer_ray KEY=VALUE…`."""

from trainer.main_ppo import run

if __name__ == "__main__":
    run("verl.trainer.sft_trainer_ray")
