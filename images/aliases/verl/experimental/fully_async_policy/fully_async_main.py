"""`python -m verl.experimental.fully_async_policy.fully_async_main KEY=VALUE…`."""

from trainer.main_ppo import run

if __name__ == "__main__":
    run("verl.experimental.fully_async_policy.fully_async_main")
