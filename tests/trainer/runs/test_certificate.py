"""What a certificate holds, what `verify` finds, and what `replay` refuses. Weights are files written by hand."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as distributed_checkpoint
from safetensors.torch import load_file, save_file
from torch import Tensor

from trainer.cli import main
from trainer.config.sections.data import DataConfig
from trainer.config.sections.model import ModelConfig
from trainer.config.sections.trainer import TrainerConfig
from trainer.config.tree import Config
from trainer.errors import CertificateError, ConfigError
from trainer.records.files.checksums import sha256
from trainer.runs.checkpoints.checkpoint import CheckpointWriter, TrainingState
from trainer.runs.checkpoints.places import run_directory
from trainer.runs.reproduction import surroundings
from trainer.runs.reproduction.certificate import CERTIFICATE, Certificate, Hardware, Input, Weights, read_certificate
from trainer.runs.reproduction.digests import checkpoint_weights, model_weights, weights_digest
from trainer.runs.reproduction.inputs import hashed_input, named_paths
from trainer.runs.reproduction.replay import compare, replay, settings_of
from trainer.runs.reproduction.verify import verify
from trainer.runs.reproduction.writer import CertificateWriter, Repeat, certify_model

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

HARDWARE = Hardware(nodes=1, engines=1, devices={"actor": ["a CPU, 2 threads"]})
WEIGHTS = {"layer.weight": torch.arange(6.0).reshape(2, 3), "layer.bias": torch.ones(2, dtype=torch.bfloat16)}


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
    own = hashlib.sha256(b'["x", "int8", [2]]\n\x01\xff').hexdigest()
    expected = hashlib.sha256(f"x {own}\n".encode()).hexdigest()
    assert weights_digest([{"x": torch.tensor([1, -1], dtype=torch.int8)}]) == expected


def test_a_model_in_several_files_has_the_digest_of_one_in_a_single_file(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    save_file(WEIGHTS, tmp_path / "one" / "model.safetensors")
    for number, (name, tensor) in enumerate(WEIGHTS.items()):
        save_file({name: tensor}, tmp_path / "two" / f"model-{number}.safetensors")
    assert model_weights(tmp_path / "one") == model_weights(tmp_path / "two") == {"model": weights_digest([WEIGHTS])}


def write_checkpoint(run: Path, step: int, weights: dict[str, Tensor]) -> Path:
    writer = CheckpointWriter(run)
    partial = writer.begin(TrainingState(step=step, seed=0, sampler={}, model="", config={}))
    state = {"network": weights, "optimizer": {"state": torch.zeros(3)}}
    distributed_checkpoint.save(state, checkpoint_id=partial / "actor", no_dist=True)
    files = list((partial / "actor").iterdir())
    return writer.complete({f"actor/{file.name}": sha256(file) for file in files})


def test_a_checkpoint_has_the_digest_of_its_weights_alone(tmp_path: Path) -> None:
    assert checkpoint_weights(write_checkpoint(tmp_path, 1, WEIGHTS)) == {"actor": weights_digest([WEIGHTS])}


def settings(directory: Path, **trainer: Any) -> Config:
    own = TrainerConfig(output_dir=directory, run_id="run", total_steps=4, **trainer)
    data = DataConfig(train_files=[directory / "data.jsonl"], cache_dir=directory / "cache")
    return Config(model=ModelConfig(path=directory / "model"), data=data, trainer=own)


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


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of two checkpoints and a model, with its inputs beside it."""
    write_inputs(tmp_path)
    run = tmp_path / "run"
    run.mkdir()
    certify(run, settings(tmp_path), steps=(1, 2))
    return run


def write_inputs(directory: Path) -> None:
    (directory / "data.jsonl").write_text('{"prompt": "1 + 1?"}\n')
    (directory / "model").mkdir()
    (directory / "model" / "config.json").write_text("{}")
    (directory / "model" / "tokenizer.json").write_text("{}")
    save_file(WEIGHTS, directory / "model" / "model.safetensors")


def certify(run: Path, config: Config, steps: tuple[int, ...], checkpoint: Path | None = None) -> Certificate:
    (run / "config.json").write_text(config.model_dump_json())
    with CertificateWriter(run, config, config, config) as writer:
        writer.prepare(HARDWARE, checkpoint)
        writer.begin()
        for step in steps:
            weights = {name: tensor + step for name, tensor in WEIGHTS.items()}
            writer.checkpoint(step, write_checkpoint(run, step, weights))
        (run / "model").mkdir(exist_ok=True)
        save_file(weights, run / "model" / "model.safetensors")
        writer.model(step, run / "model")
    return read_certificate(run)


def flip_last_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


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


def test_an_exported_model_carries_the_certificate_of_its_run(run: Path) -> None:
    certificate = read_certificate(run)
    exported = run / "models" / "step_000001"
    shutil.copytree(run / "model", exported)
    (exported / CERTIFICATE).unlink()
    assert verify(run) == [f"{exported}: no {CERTIFICATE} there"]
    content = certify_model(exported, certificate, 1)
    assert verify(run) == []
    own = read_certificate(exported)
    assert own.weights(1)["model"] == content["model"]
    assert (own.inputs, own.software, own.seed) == (certificate.inputs, certificate.software, certificate.seed)
    flip_last_byte(exported / "model.safetensors")
    (found,) = verify(run)
    assert found.startswith(f"{exported}: other weights of model")
    edited(exported, run="another")
    assert verify(run)[0] == f"{exported} is of the run another"


def test_a_run_is_as_certified(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify(run) == []
    with pytest.raises(SystemExit) as ended:
        main(["verify", str(run)])
    assert not ended.value.code
    assert capsys.readouterr().out == f"{run}: as certified\n"


@pytest.mark.parametrize(
    ("change", "found"),
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
    run: Path, change: Callable[[Path], object], found: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change(run)
    with pytest.raises(SystemExit) as ended:
        main(["verify", str(run)])
    assert ended.value.code == 1
    assert found.format(parent=run.parent) in capsys.readouterr().out


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


def edited(run: Path, /, **entries: Any) -> None:
    content = json.loads((run / CERTIFICATE).read_text())
    (run / CERTIFICATE).write_text(json.dumps(content | entries))


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


def test_a_resumed_run_continues_its_certificate(run: Path, tmp_path: Path) -> None:
    first = read_certificate(run)
    resumed = certify(run, settings(tmp_path), steps=(3,), checkpoint=run / "checkpoints" / "step_000001")
    assert resumed.steps == [1, 3]
    assert resumed.weights(1) == first.weights(1)
    assert resumed.changes == []
    assert resumed.origin is None


def test_what_changed_when_a_run_was_resumed_is_recorded_and_no_longer_repeatable(run: Path, tmp_path: Path) -> None:
    flip_last_byte(tmp_path / "data.jsonl")
    config = settings(tmp_path, seed=3)
    certificate = certify(run, config, steps=(3,), checkpoint=run / "checkpoints" / "step_000001")
    assert certificate.changes == [
        f"from step 2 on: data.train_files.0: {tmp_path}/data.jsonl changed (SHA-256)",
        "from step 2 on: trainer.seed: 0 / 3",
    ]
    with pytest.raises(ConfigError, match=r"from step 2 on: trainer\.seed: 0 / 3"):
        replay(run)


def test_a_run_from_another_runs_checkpoint_names_it(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    start = run / "checkpoints" / "step_000002"
    certificate = certify(other, settings(tmp_path), steps=(3,), checkpoint=start)
    assert certificate.origin is not None
    assert certificate.origin.path == str(start)
    assert certificate.origin == read_certificate(run).checkpoints[2].model_copy(update={"path": str(start)})


@pytest.fixture
def unreadable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An input that cannot be read when a certificate is written, but later."""
    file = tmp_path / "data.jsonl"

    def read(path: Path) -> Input:
        if path == file:
            raise OSError(5, "Input/output error")
        return hashed_input(path)

    monkeypatch.setattr("trainer.runs.reproduction.writer.hashed_input", read)
    return file


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


def test_an_input_that_cannot_be_read_costs_a_resumed_run_no_other_entry(
    run: Path, tmp_path: Path, unreadable: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = read_certificate(run)
    resumed = certify(run, settings(tmp_path), steps=(3,), checkpoint=run / "checkpoints" / "step_000001")
    assert f"{unreadable} cannot be hashed: [Errno 5] Input/output error" in caplog.text
    assert resumed.inputs["model.path"] == first.inputs["model.path"]
    assert resumed.steps == [1, 3]
    assert resumed.weights(1) == first.weights(1)
    (change,) = resumed.changes
    assert change.startswith(f"from step 2 on: data.train_files.0: {unreadable} could not be hashed")
    with pytest.raises(ConfigError, match=r"\n  data\.train_files\.0: .*data\.jsonl could not be hashed"):
        replay(run)


def test_a_resumed_checkpoint_that_was_removed_costs_no_other_entry(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, removed = read_certificate(run), run / "checkpoints" / "step_000002"
    edited(run, checkpoints={"1": first.checkpoints[1].model_dump()}, changes=["from step 1 on: another image"])
    shutil.rmtree(removed)
    resumed = certify(run, settings(tmp_path), steps=(3,), checkpoint=removed)
    assert f"{removed} cannot be hashed" in caplog.text
    assert [*resumed.checkpoints] == [1, 3]
    assert (resumed.inputs, resumed.changes) == (first.inputs, ["from step 1 on: another image"])


def test_a_run_whose_origin_was_removed_before_it_was_certified_is_not_replayed(run: Path, tmp_path: Path) -> None:
    start, other = run / "checkpoints" / "step_000002", tmp_path / "other"
    kept = start.rename(tmp_path / "kept")
    other.mkdir()
    certificate = certify(other, settings(tmp_path), steps=(3,), checkpoint=start)
    assert certificate.origin == Weights(path=str(start), content={})
    assert certificate.inputs == read_certificate(run).inputs
    with pytest.raises(ConfigError, match="step_000002 is missing"):
        replay(other)
    kept.rename(start)
    with pytest.raises(ConfigError, match="its weights could not be read when they were to be certified"):
        replay(other)


def test_a_replay_is_refused_with_every_reason(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = read_certificate(run).software.model_copy(update={"image": None, "code": "0" * 64, "python": "3.0"})
    edited(run, software=other.model_dump())
    flip_last_byte(tmp_path / "data.jsonl")
    with pytest.raises(ConfigError) as refused:
        replay(run)
    message = str(refused.value)
    assert "trainer: version" in message
    assert "python: 3.0 / " in message
    assert "data.jsonl changed (SHA-256)" in message
    assert not (tmp_path / "run-replay").exists()


def test_asynchronous_runs_and_unknown_steps_are_not_replayed(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no weights of step 7 are certified") as refused:
        replay(run, step=7)
    assert refused.value.hint == "--step is one of 1, 2"
    given = json.loads((run / CERTIFICATE).read_text())["given"]
    given["trainer"] |= {"mode": "asynchronous"}
    edited(run, given=given | {"algorithm": {"correction": "none"}})
    with pytest.raises(ConfigError, match="asynchronous: the timing of engines and learner"):
        replay(run)
    (tmp_path / "run-replay").mkdir()
    with pytest.raises(ConfigError, match="run-replay exists"):
        replay(run)


def test_a_replay_writes_nothing_where_the_run_wrote(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    own = {"dir": tmp_path / "trajectories", "validation_dir": tmp_path / "validations", "freq": 2}
    config = settings(tmp_path, trajectories=own, profiler={"dir": tmp_path / "traces"}, loggers=["wandb"])
    run = tmp_path / "run"
    run.mkdir()
    repeated = settings_of(Config, certify(run, config, steps=(1,)), run, tmp_path / "again").trainer
    assert run_directory(repeated) == tmp_path / "again"
    assert (repeated.trajectories.dir, repeated.trajectories.validation_dir, repeated.profiler.dir) == (None,) * 3
    assert repeated.trajectories.freq == 2
    assert repeated.total_steps == 4
    assert repeated.loggers == []


def test_a_replay_starts_from_a_checkpoint_in_the_run_s_own_directory_wherever_it_is_called(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = run / "checkpoints" / "step_000002"
    (run / CERTIFICATE).unlink()
    certificate = certify(run, settings(tmp_path), steps=(3,), checkpoint=start)
    assert certificate.origin is not None
    assert certificate.origin.path == "checkpoints/step_000002"
    monkeypatch.chdir(tmp_path)
    for directory in (run, Path("run")):
        assert settings_of(Config, certificate, directory, tmp_path / "again").trainer.resume == start


WHOLE = {"step": 2, "reward/mean": 0.5, "rollout/synced_bytes": 64.0, "validation/exact_match": 0.25, "time/step": 1.0}
CUT_OFF = {"step": 2, "reward/mean": 0.5, "trainer/interrupted": 1.0}


@pytest.mark.parametrize(
    ("row", "found"),
    [
        (WHOLE, []),
        (CUT_OFF, []),
        (CUT_OFF | {"rollout/synced_bytes": 64.0}, []),
        (CUT_OFF | {"rollout/synced_bytes": 32.0}, ["step 2: rollout/synced_bytes: 32.0 / 64.0"]),
        (CUT_OFF | {"reward/mean": 0.75}, ["step 2: reward/mean: 0.75 / 0.5"]),
        (CUT_OFF | {"watchdog/memory_growth": 1.0}, []),
        (CUT_OFF | {"watchdog/kl": 1.0}, ["step 2: watchdog/kl: 1.0 / None"]),
        ({"step": 2, "trainer/interrupted": 1.0, **WHOLE, "validation/exact_match": 0.5}, ["exact_match: 0.5 / 0.25"]),
        ({name: own for name, own in WHOLE.items() if "validation" not in name}, ["exact_match: None / 0.25"]),
    ],
)
def test_a_replay_misses_only_what_a_run_was_interrupted_before(
    run: Path, row: dict[str, float], found: list[str]
) -> None:
    """A step that was interrupted after its update is not taken again: its row lacks what is measured later."""
    certificate, repeated = read_certificate(run), run.parent / "run-replay"
    shutil.copytree(run, repeated)
    (run / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    (repeated / "metrics.jsonl").write_text(json.dumps(WHOLE) + "\n")
    for one, other in ((run, repeated), (repeated, run)):
        differences = compare(one, certificate, other, 2).differences
        assert len(differences) == len(found)
    differences = compare(run, certificate, repeated, 2).differences
    assert all(line.endswith(end) for line, end in zip(differences, found, strict=True))


def test_a_replay_on_other_hardware_is_refused(tmp_path: Path) -> None:
    config = settings(tmp_path)
    with CertificateWriter(tmp_path, config, config, config, Repeat(HARDWARE, 2)) as writer:
        assert writer.last_step(4) == 2
        with pytest.raises(ConfigError, match=r"computed on 1 nodes.*a CPU, 2 threads.*, this is 2 nodes"):
            writer.prepare(HARDWARE.model_copy(update={"nodes": 2}), None)


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
