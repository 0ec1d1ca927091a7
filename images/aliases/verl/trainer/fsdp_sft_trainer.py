"""`torchrun -m verl.trainer.fsdp_sft_trainer KEY=VALUE…`."""

from trainer.main_ppo import run

if __name__ == "__main__":
    run("verl.trainer.fsdp_sft_trainer")
