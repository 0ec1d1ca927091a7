"""A small Qwen2 model with random weights and its own tokenizer: enough to run PPO on a laptop."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from trainer.errors import DataError
from trainer.records.files.atomic import atomic_directory
from trainer.records.files.disk import writing

PAD, END, USER, ASSISTANT = "<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"

_CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|' + message['role'] + '|>' + message['content'] -}}"
    "{%- if message['role'] == 'assistant' -%}{{- '<|end|>' -}}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a Qwen2 model. `hidden_size` is divided among `attention_heads`."""

    layers: int = 2
    hidden_size: int = 128
    intermediate_size: int = 512
    attention_heads: int = 4
    key_value_heads: int = 2
    max_positions: int = 512


def build_tokenizer(texts: Iterable[str], vocabulary_size: int = 512) -> Any:
    """Qwen2's byte-level BPE tokenizer with a vocabulary trained on `texts` only.

    Any text survives encoding and decoding. Frequent words are single tokens, and numbers have one token per digit, so
    that a model can learn arithmetic on digits.
    """
    # Transformers always loads a Qwen2 model's tokenizer with this class; another class would not survive a reload.
    untrained = Qwen2Tokenizer(
        vocab={PAD: 0},
        merges=[],
        unk_token=PAD,
        pad_token=PAD,
        eos_token=END,
        extra_special_tokens=[USER, ASSISTANT],
        chat_template=_CHAT_TEMPLATE,
    )
    return untrained.train_new_from_iterator(texts, vocabulary_size, show_progress=False)


def create_model(tokenizer: Any, shape: ModelShape, seed: int) -> Any:
    """A Qwen2 causal language model in float32 with random weights, for this tokenizer's vocabulary."""
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.attention_heads,
            num_key_value_heads=shape.key_value_heads,
            max_position_embeddings=shape.max_positions,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            dtype="float32",
        )
    )


def save_model(model: Any, tokenizer: Any, directory: Path) -> None:
    """Writes model and tokenizer to `directory` atomically, replacing an existing model.

    Raises DataError if `directory` holds something else, CheckpointError if the disk refuses the model.
    """
    if directory.exists() and not (directory / "config.json").is_file():
        raise DataError(f"{directory}: exists and is not a model", hint="name a directory that does not exist yet")
    size = sum(weight.nbytes for weight in model.parameters())
    with writing(directory), atomic_directory(directory) as temporary, writing(temporary, size):
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
