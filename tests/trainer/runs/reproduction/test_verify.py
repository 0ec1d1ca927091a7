"""What `trainer verify` finds."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.trainer.runs.reproduction.conftest import (
    WEIGHTS,
    certify,
    edited,
    flip_last_byte,
    settings,
    write_checkpoint,
    write_inputs,
)
from trainer.cli import main
from trainer.errors import CertificateError
from trainer.runs.reproduction.certificate import CERTIFICATE, read_certificate
from trainer.runs.reproduction.verify import verify
from trainer.runs.reproduction.writer import certify_model

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def other_weights(run: Path) -> None:
    """A checkpoint that is whole, with another weight."""
    write_checkpoint(run, 2, {**WEIGHTS, "layer.bias": torch.zeros(2, dtype=torch.bfloat16)})


def other_setting(run: Path) -> None:
    content = json.loads((run / "config.json").read_text())
    content["actor"]["learning_rate"] = 1.0
    (run / "config.json").write_text(json.dumps(content))


def another_model(run: Path) -> None:
    weights = load_file(run / "model" / "model.safetensors")
    weights["layer.bias"][0] += 1
    save_file(weights, run / "model" / "model.safetensors")


def test_a_run_is_as_certified(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify(run) == []
    with pytest.raises(SystemExit) as ended:
        main(["verify", str(run)])
    assert not ended.value.code
    assert capsys.readouterr().out == f"{run}: as certified\n"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda run: flip_last_byte(run.parent / "data.jsonl"), "data.train_files.0: {parent}/data.jsonl changed"),
        (lambda run: (run.parent / "data.jsonl").unlink(), "data.train_files.0: {parent}/data.jsonl is missing"),
        (lambda run: flip_last_byte(run.parent / "model/tokenizer.json"), "model/tokenizer.json changed (SHA-256)"),
        (lambda run: flip_last_byte(run.parent / "model/model.safetensors"), "model/model.safetensors changed"),
        (
            lambda run: (run.parent / "model/added.json").write_text("{}"),
            "model.path: {parent}/model/added.json is new",
        ),
        (lambda run: flip_last_byte(run / "checkpoints/step_000001/actor/__0_0.distcp"), "__0_0.distcp changed since"),
        (lambda run: shutil.rmtree(run / "checkpoints/step_000001"), "checkpoints/step_000001 is missing"),
        (
            lambda run: shutil.copytree(run / "checkpoints/step_000001", run / "checkpoints/step_000009"),
            "step_000009 is not in",
        ),
        (other_weights, "checkpoints/step_000002: other weights of actor"),
        (another_model, "run/model: other weights of model"),
        (other_setting, "config.json.actor.learning_rate: 1e-06 / 1.0"),
        (lambda run: (run / "config.json").unlink(), "its settings (config.json) are missing"),
        (lambda run: (run / "model/model.safetensors").write_bytes(b"x"), "run/model: its weights cannot be read"),
        (lambda run: edited(run, models={}), "run/model is not in the certificate"),
    ],
)
def test_verify_names_what_differs(
    run: Path, change: Callable[[Path], object], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change(run)
    with pytest.raises(SystemExit) as ended:
        main(["verify", str(run)])
    assert ended.value.code == 1
    assert message.format(parent=run.parent) in capsys.readouterr().out


def test_an_exported_model_carries_the_certificate_of_its_run(run: Path) -> None:
    certificate = read_certificate(run)
    exported = run / "models" / "step_000001"
    shutil.copytree(run / "model", exported)
    (exported / CERTIFICATE).unlink()
    assert verify(run) == [f"{exported}: no {CERTIFICATE} there"]
    content = certify_model(exported, certificate, 1)
    assert verify(run) == []
    of_model = read_certificate(exported)
    assert of_model.weights(1)["model"] == content["model"]
    assert (of_model.inputs, of_model.software, of_model.seed) == (
        certificate.inputs,
        certificate.software,
        certificate.seed,
    )
    flip_last_byte(exported / "model.safetensors")
    (line,) = verify(run)
    assert line.startswith(f"{exported}: other weights of model")
    edited(exported, run="another")
    assert verify(run)[0] == f"{exported} is of the run another"


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"format": 1}', b'{"run": "\\u0000"}'],
)
def test_a_damaged_certificate_is_refused_in_a_sentence(
    run: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / CERTIFICATE).write_bytes(content)
    for command in ("verify", "replay"):
        with pytest.raises(SystemExit) as ended:
            main([command, str(run)])
        assert ended.value.code == 1
        assert f"error: {run / CERTIFICATE}: damaged: " in capsys.readouterr().err


def test_a_certificate_with_an_impossible_path_is_refused(run: Path) -> None:
    edited(run, models={"2": {"path": "a\0b", "content": {}}})
    with pytest.raises(CertificateError, match=r"models\.2\.path"):
        verify(run)
    edited(run, models={"2": {"path": "a" * 300, "content": {}}})
    too_long, uncertified = verify(run)
    assert "File name too long" in too_long
    assert uncertified == f"{run / 'model'} is not in the certificate"


def test_verify_says_that_there_is_no_certificate(tmp_path: Path) -> None:
    with pytest.raises(CertificateError, match=r"no certificate\.json there"):
        verify(tmp_path)


def test_checkpoints_that_a_run_removed_itself_are_no_difference(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    run = tmp_path / "run"
    run.mkdir()
    certify(run, settings(tmp_path, keep_checkpoints=1), steps=(1, 2))
    shutil.rmtree(run / "checkpoints" / "step_000001")
    assert verify(run) == []
    shutil.rmtree(run / "checkpoints" / "step_000002")
    assert verify(run) == [f"{run}/checkpoints/step_000002 is missing"]


def test_an_input_that_could_not_be_hashed_is_never_as_certified(
    tmp_path: Path, unreadable: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_inputs(tmp_path)
    run = tmp_path / "run"
    run.mkdir()
    certify(run, settings(tmp_path), steps=(1,))
    unchecked = (
        f"data.train_files.0: {unreadable} could not be hashed for the certificate: [Errno 5] Input/output error"
    )
    assert verify(run) == [unchecked]
    with pytest.raises(SystemExit) as ended:
        main(["verify", str(run)])
    assert ended.value.code == 1
    assert capsys.readouterr().out == f"{unchecked}\n"
    unreadable.unlink()
    assert verify(run) == [unchecked]
