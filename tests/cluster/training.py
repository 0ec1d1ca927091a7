"""A short real run that saves after every step: `python -m tests.cluster.training DIRECTORY STEPS`, inside the image.

Continues the run in DIRECTORY if there is one. Model and data are made in /tmp, always the same.
"""

import os
import sys
from pathlib import Path

from trainer.data.arithmetic import write_arithmetic
from trainer.models.small import ModelShape, build_tokenizer, create_model, save_model

HERE = Path("/tmp/training")


def main() -> None:
    directory, steps = sys.argv[1:]
    train, _, held_out = write_arithmetic(HERE / "data", 64, 4, 9, 0.75, 0)
    tokenizer = build_tokenizer(["How many are 1 + 2? #### 3"])
    save_model(create_model(tokenizer, ModelShape(), seed=0), tokenizer, HERE / "model")
    settings = [
        *(f"model.path={HERE}/model", f"data.train_files={train}", f"data.validation_files={held_out}"),
        *("data.max_prompt_length=128", "data.max_response_length=16", "data.train_batch_size=4"),
        *("rollout.samples_per_prompt=2", "rollout.engine=transformers", "actor.mini_batch_size=8"),
        *("algorithm.advantage=grpo", "algorithm.kl_coefficient=0", "trainer.test_freq=-1", "trainer.save_freq=1"),
        *(f"trainer.output_dir={directory}", "trainer.run_id=run", "trainer.resume=auto"),
        f"trainer.total_steps={steps}",
    ]
    os.execv(sys.executable, [sys.executable, "-m", "trainer", "train", *settings])


if __name__ == "__main__":
    main()
