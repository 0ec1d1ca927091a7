"""Files of weights are complete, or refused before anything starts."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from trainer.cli import main
from trainer.config.tree import Config
from trainer.errors import DataError
from trainer.models.weight_files import check_weights

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model whose weights are in two files."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text('{"vocab_size": 9}')
    save_file({"a": torch.ones(1000)}, directory / FIRST)
    save_file({"b": torch.ones(1000), "c": torch.ones(2)}, directory / SECOND)
    places = {"a": FIRST, "b": SECOND, "c": SECOND}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return directory


def check(model: Path, **settings: object) -> None:
    check_weights(Config.model_validate({"model": {"path": model}, "algorithm": {"advantage": "gae"}, **settings}))


def test_complete_weights_are_accepted(model: Path) -> None:
    check(model)


@pytest.mark.parametrize("length", [0, 7, 50, 2000, -1])
def test_a_truncated_file_is_named(model: Path, length: int) -> None:
    content = (model / SECOND).read_bytes()
    (model / SECOND).write_bytes(content[:length])
    with pytest.raises(DataError, match=rf"{model / SECOND}: not a readable safetensors file"):
        check(model)


def test_a_run_with_a_truncated_file_ends_before_it_starts(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (model / SECOND).write_bytes((model / SECOND).read_bytes()[:-4])
    with pytest.raises(SystemExit) as ended:
        main(["train", f"model.path={model}", f"trainer.output_dir={tmp_path / 'runs'}"])
    assert ended.value.code == 3
    assert f"error: {model / SECOND}: not a readable safetensors file" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_missing_file_and_a_missing_weight_are_named(model: Path) -> None:
    save_file({"b": torch.ones(1000)}, model / SECOND)
    with pytest.raises(DataError, match=rf"{model / SECOND}: lacks c, which"):
        check(model)
    (model / FIRST).unlink()
    with pytest.raises(DataError, match=rf"{model / FIRST}: not a readable safetensors file"):
        check(model)


def test_a_model_without_weights_or_with_pickles_only_is_refused(model: Path) -> None:
    (model / "model.safetensors.index.json").unlink()
    (model / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(DataError, match="no weights: neither"):
        check(model)


@pytest.mark.parametrize("places", [None, [], {"a": 3}, "x"])
def test_an_index_of_another_type_is_refused(model: Path, places: object) -> None:
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(DataError, match="no weight_map"):
        check(model)


@pytest.mark.parametrize(
    ("settings", "setting"),
    [
        ({"critic": {"path": "PATH"}}, r"critic\.path"),
        ({"reward": {"model": {"path": "PATH"}}}, r"reward\.model\.path"),
        ({"distillation": {"teacher": "PATH"}}, r"distillation\.teacher"),
        ({"actor": {"lora": {"path": "PATH"}}}, "adapter_model.safetensors: not a readable"),
        ({"critic": {"lora": {"path": "PATH"}}}, "adapter_model.safetensors: not a readable"),
    ],
)
def test_every_model_and_adapter_of_a_run_is_checked(
    model: Path, tmp_path: Path, settings: dict[str, object], setting: str
) -> None:
    (tmp_path / "empty").mkdir()
    named = json.loads(json.dumps(settings).replace("PATH", str(tmp_path / "empty")))
    with pytest.raises(DataError, match=setting):
        check(model, **named)
