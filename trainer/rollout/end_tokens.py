"""Where a model ends its answers."""

from pathlib import Path

from transformers import AutoTokenizer, GenerationConfig


def end_token_ids(model: Path) -> list[int]:
    """The end token of the tokenizer and those of the generation settings; chat models often have two."""
    ids = {AutoTokenizer.from_pretrained(model, local_files_only=True).eos_token_id}
    if (model / "generation_config.json").is_file():
        found = GenerationConfig.from_pretrained(model, local_files_only=True).eos_token_id
        ids |= set(found if isinstance(found, list) else [found])
    return sorted(ids - {None})
