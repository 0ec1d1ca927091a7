"""`python -m verl.trainer.fsdp_sft_trainer`: says what to use instead."""

from trainer.main_ppo import run

if __name__ == "__main__":
    run("verl.trainer.fsdp_sft_trainer")
