"""The tokens that end a response."""

from pathlib import Path

from trainer.models.pretrained import read_generation_config, read_tokenizer


def end_token_ids(model: Path) -> list[int]:
    """The end tokens of the tokenizer and of generation_config.json, sorted. Chat models often have two."""
    ids = {read_tokenizer(model).eos_token_id}
    if (model / "generation_config.json").is_file():
        configured = read_generation_config(model).eos_token_id
        ids |= set(configured if isinstance(configured, list) else [configured])
    return sorted(ids - {None})
