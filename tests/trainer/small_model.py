"""A small model on disk, for tests that only need one."""

from pathlib import Path

from trainer.models.small import ModelShape, build_tokenizer, create_model, save_model


def write_small_model(directory: Path, seed: int = 0, **shape: int) -> Path:
    """The directory, with random weights and a tokenizer; `shape` are fields of ModelShape."""
    tokenizer = build_tokenizer(["How many are 1 + 2? #### 3"])
    save_model(create_model(tokenizer, ModelShape(**shape), seed), tokenizer, directory)
    return directory
