"""Code that lies beside a model never runs, whatever its files and standard input say."""

import ast
import io
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from tests.trainer.small_model import write_small_model
from trainer.errors import DataError
from trainer.models.export import write_language_model
from trainer.models.pretrained import (
    empty_language_model,
    load_classifier,
    load_language_model,
    random_language_model,
    read_config,
    read_tokenizer,
)
from trainer.models.small import ModelShape, build_tokenizer, create_model, save_model

ROOT = Path(__file__).parents[3]
CODE = """
from pathlib import Path
Path(__file__).with_name("it_ran").touch()
Path({mark!r}).touch()
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
class Config(PretrainedConfig):
    model_type = "of_somebody"
class Model(PreTrainedModel):
    config_class = Config
class Tokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model that names code of its own for everything that Transformers looks up."""
    directory = write_small_model(tmp_path / "model")
    (directory / "code.py").write_text(CODE.format(mark=str(tmp_path / "it_ran")))
    kinds = {"AutoConfig": "code.Config", "AutoTokenizer": ["code.Tokenizer", "code.Tokenizer"]}
    kinds |= dict.fromkeys(("AutoModelForCausalLM", "AutoModelForSequenceClassification"), "code.Model")
    for name in ("config.json", "tokenizer_config.json"):
        content = json.loads((directory / name).read_text())
        content["auto_map"] = kinds
        if name == "config.json":
            content |= {"model_type": "of_somebody", "architectures": ["Model"]}
        (directory / name).write_text(json.dumps(content))
    return directory


@pytest.mark.parametrize(
    "load",
    [
        read_config,
        load_language_model,
        random_language_model,
        empty_language_model,
        lambda model: load_classifier(model, torch.float32),
        lambda model: write_language_model(model, [], torch.float32, model.with_name("exported")),
    ],
)
def test_code_beside_a_model_is_refused_and_nobody_is_asked(
    model: Path, load: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = io.StringIO("y\n" * 9)
    monkeypatch.setattr("sys.stdin", answers)
    with pytest.raises(DataError, match="Transformers cannot load it"):
        load(model)
    assert answers.tell() == 0
    assert not (model.parent / "it_ran").exists()


def test_a_tokenizer_with_code_is_read_without_it(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = io.StringIO("y\n" * 9)
    monkeypatch.setattr("sys.stdin", answers)
    with suppress(DataError):
        read_tokenizer(model)
    assert answers.tell() == 0
    assert not (model.parent / "it_ran").exists()


def test_every_model_and_tokenizer_is_loaded_in_one_place() -> None:
    """A call elsewhere would have to repeat that no code runs."""
    places = [
        file.relative_to(ROOT).as_posix()
        for file in sorted((ROOT / "trainer").rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("from_pretrained", "from_config")
    ]
    assert set(places) == {"trainer/models/pretrained.py"}


def test_weights_in_a_pickle_are_not_read(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(["How many are 1 + 2? #### 3"])
    network = create_model(tokenizer, ModelShape(), seed=0)
    save_model(network, tokenizer, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    torch.save(network.state_dict(), tmp_path / "model" / "pytorch_model.bin")
    with pytest.raises(DataError, match="Transformers cannot load it"):
        load_language_model(tmp_path / "model")
