"""Models and tokenizers in Transformers' format, read from local files. Code beside a
model never runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
)

from trainer.errors import DataError
from trainer.models.file_weights import FileWeight, file_weights

MOST_LAYERS = 1000  # the largest models have about a hundred
_NO_CODE = {"trust_remote_code": False}
_LOCAL = {"local_files_only": True, **_NO_CODE}
_WEIGHTS = {**_LOCAL, "use_safetensors": True}  # others are pickles


def read_config(model: Path) -> Any:
    """The configuration of a model. Raises DataError, also for more layers than `MOST_LAYERS`."""
    with _explained(model):
        settings, _ = PretrainedConfig.get_config_dict(model, **_LOCAL)
        # Transformers would make a list of them, whatever their number.
        for section in (settings, settings.get("text_config")):
            layers = section.get("num_hidden_layers") if isinstance(section, dict) else None
            if isinstance(layers, int | float) and layers > MOST_LAYERS:
                raise ValueError(f"config.json has num_hidden_layers={layers}, more than {MOST_LAYERS:,}")
        return AutoConfig.from_pretrained(model, **_LOCAL)


def read_tokenizer(model: Path) -> Any:
    """The tokenizer of a model. Raises DataError."""
    with _explained(model):
        return AutoTokenizer.from_pretrained(model, **_LOCAL)


def read_generation_config(model: Path) -> Any:
    """The generation defaults of a model that has some. Raises DataError."""
    with _explained(model):
        return GenerationConfig.from_pretrained(model, local_files_only=True)


def load_language_model(
    model: Path, dtype: torch.dtype = torch.float32, needs_head: bool = True, in_files: bool = False
) -> nn.Module:
    """A causal language model on CPU. With `in_files` its parameters are `FileWeight`s, which stay in their files.

    Raises DataError, also if the files lack weights, which would be random; those of the output head may lack unless
    `needs_head`.
    """
    with _explained(model):
        loading = {"dtype": dtype, "output_loading_info": True}
        if in_files:
            empty = empty_language_model(model, dtype)  # Transformers takes a state without the name of a model
            language_model, report = type(empty).from_pretrained(
                None, config=empty.config, state_dict=file_weights(model), **loading
            )
        else:
            language_model, report = AutoModelForCausalLM.from_pretrained(model, **loading, **_WEIGHTS)
    for module in language_model.modules() if in_files else ():
        for name, buffer in module.named_buffers(recurse=False):
            if isinstance(buffer, FileWeight):
                module._buffers[name] = buffer.whole()
    output = language_model.get_output_embeddings()
    head = tuple(f"{name}." for name, module in language_model.named_modules() if module is output)
    missing = sorted(name for name in report["missing_keys"] if needs_head or not name.startswith(head))
    if missing:
        raise DataError(
            f"{model}: its files lack {', '.join(missing[:3])}{', …' if len(missing) > 3 else ''}: as a "
            f"{type(language_model).__name__}, these weights would be random",
            hint="use a causal language model that was saved with all its weights",
        )
    return language_model


def why_not_in_files(model: Path) -> str | None:
    """Why parameters of a model cannot stay in its files; None if they can. Raises DataError."""
    return "its weights are quantised" if getattr(read_config(model), "quantization_config", None) else None


def random_language_model(model: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The same model with random weights. Raises DataError."""
    config = read_config(model)
    with _explained(model):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, **_NO_CODE)


def empty_language_model(model: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The same model on the device `meta`, without memory for its weights. Raises DataError."""
    with torch.device("meta"):
        return random_language_model(model, dtype).eval()


def load_classifier(model: Path, dtype: torch.dtype) -> tuple[nn.Module, set[str]]:
    """A sequence classifier on CPU, and the names of the weights that its files lack. Raises DataError."""
    with _explained(model):
        classifier, report = AutoModelForSequenceClassification.from_pretrained(
            model, dtype=dtype, output_loading_info=True, **_WEIGHTS
        )
    return classifier, set(report["missing_keys"])


@contextmanager
def _explained(model: Path) -> Iterator[None]:
    from huggingface_hub.errors import StrictDataclassError

    try:
        yield
    except (
        *(StrictDataclassError, SafetensorError, OSError, RuntimeError, ImportError),
        *(ValueError, TypeError, AttributeError, LookupError, ArithmeticError),
    ) as error:
        raise DataError(
            f"{model}: Transformers cannot load it: {error}",
            hint="name a directory with config.json, *.safetensors and a tokenizer that every node can read; restore "
            "its files from the model's source",
        ) from error
