"""The tokens that end a response."""

from pathlib import Path

from transformers import AutoTokenizer, GenerationConfig


def end_token_ids(model: Path) -> list[int]:
    """The end tokens of the tokenizer and of generation_config.json, sorted. Chat models often have two."""
    ids = {AutoTokenizer.from_pretrained(model, local_files_only=True).eos_token_id}
    if (model / "generation_config.json").is_file():
        found = GenerationConfig.from_pretrained(model, local_files_only=True).eos_token_id
        ids |= set(found if isinstance(found, list) else [found])
    return sorted(ids - {None})
