"""What a certificate names weights, inputs, images and code by."""

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.trainer.runs.reproduction.conftest import WEIGHTS, settings, write_checkpoint
from trainer.records.files.checksums import sha256
from trainer.runs.reproduction import surroundings
from trainer.runs.reproduction.digests import checkpoint_weights, model_weights, weights_digest
from trainer.runs.reproduction.inputs import named_paths

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def one_changed() -> list[dict[str, Tensor]]:
    """WEIGHTS with one thing changed: a bit, a name, a type, a shape, or a tensor left out."""
    bit = WEIGHTS["layer.weight"].clone()
    bit.view(torch.int32)[1, 2] ^= 1
    return [
        {**WEIGHTS, "layer.weight": bit},
        {"weight": WEIGHTS["layer.weight"], "layer.bias": WEIGHTS["layer.bias"]},
        {**WEIGHTS, "layer.bias": WEIGHTS["layer.bias"].view(torch.float16)},
        {**WEIGHTS, "layer.weight": WEIGHTS["layer.weight"].reshape(3, 2)},
        {"layer.weight": WEIGHTS["layer.weight"]},
    ]


def test_a_digest_does_not_depend_on_the_order_of_tensors_and_their_groups() -> None:
    digest = weights_digest([WEIGHTS])
    assert digest == weights_digest([{name: WEIGHTS[name]} for name in reversed(WEIGHTS)])
    assert digest == weights_digest([{**WEIGHTS, "layer.weight": WEIGHTS["layer.weight"].t().contiguous().t()}])


def test_a_digest_changes_with_every_bit_name_type_and_shape() -> None:
    digests = {weights_digest([weights]) for weights in (WEIGHTS, *one_changed())}
    assert len(digests) == 6


def test_a_digest_is_the_documented_one() -> None:
    """Computed by hand from the docstring of `weights_digest`."""
    digest = hashlib.sha256(b'["x", "int8", [2]]\n\x01\xff').hexdigest()
    expected = hashlib.sha256(f"x {digest}\n".encode()).hexdigest()
    assert weights_digest([{"x": torch.tensor([1, -1], dtype=torch.int8)}]) == expected


def test_a_model_in_several_files_has_the_digest_of_one_in_a_single_file(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    save_file(WEIGHTS, tmp_path / "one" / "model.safetensors")
    for number, (name, tensor) in enumerate(WEIGHTS.items()):
        save_file({name: tensor}, tmp_path / "two" / f"model-{number}.safetensors")
    assert model_weights(tmp_path / "one") == model_weights(tmp_path / "two") == {"model": weights_digest([WEIGHTS])}


def test_a_checkpoint_has_the_digest_of_its_weights_alone(tmp_path: Path) -> None:
    assert checkpoint_weights(write_checkpoint(tmp_path, 1, WEIGHTS)) == {"actor": weights_digest([WEIGHTS])}


def test_the_inputs_are_what_the_settings_name_and_the_run_does_not_write(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages }}")
    config = settings(tmp_path)
    config = config.model_copy(update={"data": config.data.model_copy(update={"chat_template": str(template)})})
    assert dict(named_paths(config)) == {
        "model.path": tmp_path / "model",
        "data.train_files.0": tmp_path / "data.jsonl",
        "data.chat_template": template,
    }


def test_an_image_is_known_by_its_manifest(tmp_path: Path) -> None:
    manifest = tmp_path / "image.json"
    assert surroundings.read_image(manifest) is None
    manifest.write_text('{"target": "cpu", "variant": "v", "version": "0.1.0", "lock": "sha256:1"}')
    image = surroundings.read_image(manifest)
    assert image is not None
    assert (image.target, image.lock, image.manifest) == ("cpu", "sha256:1", sha256(manifest))
    manifest.write_text("[]")
    assert surroundings.read_image(manifest) is None


def test_the_code_is_known_by_its_files(tmp_path: Path) -> None:
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "a.py").write_text("1")
    first = surroundings.code_digest(tmp_path)
    (tmp_path / "__pycache__" / "a.pyc").write_text("1")
    assert surroundings.code_digest(tmp_path) == first
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    assert surroundings.code_digest(tmp_path) != first
