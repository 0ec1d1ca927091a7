"""`model.override_config`: what training, engines and export read, and which entries are refused."""

from pathlib import Path

import pytest
from transformers import AutoConfig

from trainer.config.tree import Config
from trainer.errors import ConfigError
from trainer.models.overrides import with_overrides
from trainer.models.pretrained import load_language_model


def settings(model: Path, output: Path, **entries: object) -> Config:
    return Config.model_validate(
        {"model": {"path": model, "override_config": entries}, "trainer": {"output_dir": output}}
    )


def test_an_entry_replaces_the_models_own(model: Path, tmp_path: Path) -> None:
    directory = with_overrides(settings(model, tmp_path, max_position_embeddings=4096)).model.directory
    assert AutoConfig.from_pretrained(directory).max_position_embeddings == 4096
    assert AutoConfig.from_pretrained(model).max_position_embeddings != 4096
    assert load_language_model(directory).config.max_position_embeddings == 4096
    assert with_overrides(settings(model, tmp_path, max_position_embeddings=4096)).model.directory == directory
    assert with_overrides(settings(model, tmp_path, max_position_embeddings=8192)).model.directory != directory


def test_without_entries_the_model_is_read_where_it_is(model: Path, tmp_path: Path) -> None:
    assert with_overrides(settings(model, tmp_path)).model.directory == model


@pytest.mark.parametrize(
    ("entry", "value", "message", "hint"),
    [
        ("max_position_embedings", 9, "no entry max_position_embedings", "did you mean max_position_embeddings"),
        ("attention_dropout", 0.1, "dropout stays off", "set it to 0"),
        ("attn_implementation", "eager", "cannot be chosen", "leave it out"),
        ("torch_dtype", "float16", "not an entry to override", "set model.dtype"),
    ],
)
def test_entries_without_an_effect_are_refused(
    entry: str, value: object, message: str, hint: str, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        with_overrides(settings(model, tmp_path, **{entry: value}))
    assert hint in caught.value.hint
