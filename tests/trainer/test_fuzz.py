"""No input of the trainer causes a traceback: a few of those that `python -m tests.fuzz train` draws."""

from contextlib import suppress
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.damage import Target
from tests.fuzz.train import CERTIFICATE, CONFIGS, PAIRS, PROMPTS, REQUEST, STATE, TARGETS, dumped
from tests.sealing import with_seal
from trainer.errors import CheckpointError, TrainerError


@pytest.mark.parametrize("target", TARGETS, ids=[target.name for target in TARGETS])
@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32))
def test_damaged_inputs_are_read_or_refused(target: Target, seed: int) -> None:
    target.attempt(Random(seed))


def test_what_is_not_damaged_is_read() -> None:
    """Else every damaged input would be refused for another reason than its damage."""
    by_name = {target.name: target for target in TARGETS}
    by_name["prompts"].read(dumped(PROMPTS[0]))
    by_name["preferences"].read(dumped(PAIRS[0]))
    by_name["config.json"].read(dumped(CONFIGS[0]))
    by_name["certificates"].read(with_seal(CERTIFICATE).encode())
    with pytest.raises(CheckpointError, match=r"state\.json has \d+ bytes instead of 100"):  # all but its files
        by_name["checkpoints"].read(with_seal(STATE).encode())
    by_name["requests of programs"].read(dumped(REQUEST))
    for argument in ("actor.learning_rate=1e-6", "trainer.logger=['console','wandb']"):
        by_name["overrides"].read([argument])


@pytest.mark.parametrize(
    ("target", "content"),
    [
        ("settings files", b"actor: &a\n  lora: *a\n"),
        ("settings files", b"defaults: 3\n"),
        ("settings files", b'defaults: ["\\uD800"]\n'),
        ("settings files", b"data: {train_files: ~nobody/a.parquet}\n"),
        (
            "config.json",
            b'{"model_type": "qwen2", "vocab_size": 9, "rope_parameters": null, "num_attention_heads": "x"}',
        ),
        ("config.json", b'{"vocab_size": 9, "hidden_size": 1e999, "text_config": 3}'),
        ("settings files", b"defaults: ['" + b"9" * 300 + b"']\n"),
        ("config.json", b'{"model_type": "qwen2", "vocab_size": 9, "num_hidden_layers": 9223372036854775808}'),
        ("config.json", b"[]"),
        ("rewards", 10**400),
        ("rewards", {"score": 1.0, "token_rewards": 3}),
        ("rewards", {"score": 1.0, "length": 10**400, "pred": 10**5000}),
    ],
)
def test_what_once_caused_a_traceback(target: str, content: Any) -> None:
    fuzzed = next(candidate for candidate in TARGETS if candidate.name == target)
    with suppress(TrainerError):
        fuzzed.read(content)
