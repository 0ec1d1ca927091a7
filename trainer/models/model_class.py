"""Which of Transformers' classes a run would train, and whether that is all of the model it was given.

`AutoModelForCausalLM` takes the text part of some models with images, and a new head for classifiers and encoders. The
export would be such a part under another class, and nothing would say so.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.errors import DataError

_PARTS = ("vision_config", "audio_config", "vq_config", "image_config", "speech_config")  # of models that see or hear


def check_causal(model: Path, settings: Mapping[str, Any], setting: str) -> str | None:
    """The class that Transformers makes of a model with this `config.json`; None if that names no type.

    Raises DataError if it is not a causal language model.
    """
    from transformers import __version__
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # takes seconds

    kind = settings.get("model_type")
    if not isinstance(kind, str):
        return None
    made: str | None = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
    if made is None:
        named = "".join(f" ({name})" for name in _architectures(settings)[:1])
        raise DataError(
            f"{setting}={model}: Transformers {__version__} has no causal language model of the type {kind}{named}",
            hint="use a model of text alone: images and audio are not supported"
            if _sees_or_hears(settings)
            else f"set {setting} to a causal language model that this version of Transformers knows",
        )
    return made


def check_exported(model: Path, settings: Mapping[str, Any], setting: str) -> None:
    """Raises DataError unless the trained model would be exported under the class of the one at `model`."""
    made, given = check_causal(model, settings, setting), _architectures(settings)
    if made is None or not given or any(_same(made, name) for name in given):
        return
    if _sees_or_hears(settings):
        raise DataError(
            f"{setting}={model} is a {given[0]}: a run would train and export its text part alone, a {made}",
            hint="write that part with AutoModelForCausalLM.from_pretrained(MODEL).save_pretrained(DIRECTORY), copy "
            f"the tokenizer's files, and set {setting}=DIRECTORY",
        )
    raise DataError(
        f"{setting}={model} is a {given[0]}: as a {made}, it would lack weights or have random ones",
        hint=f"use a checkpoint of {made}",
    )


def _architectures(settings: Mapping[str, Any]) -> list[str]:
    architectures = settings.get("architectures")
    return [name for name in architectures if isinstance(name, str)] if isinstance(architectures, list) else []


def _sees_or_hears(settings: Mapping[str, Any]) -> bool:
    return any(settings.get(name) for name in _PARTS)


def _same(name: str, other: str) -> bool:
    """Files of earlier years spell some classes in other cases: LLaMAForCausalLM, MPTForCausalLM."""
    return name.replace("_", "").lower() == other.replace("_", "").lower()
