"""verl's keys for sampling, validation and the chat template."""

import pytest

from trainer.compat.settings import load_config
from trainer.errors import ConfigError

ROLLOUT = "actor_rollout_ref.rollout"


def test_truncation_and_validation_keep_their_meaning() -> None:
    config, notes = load_config(
        [],
        [
            *(f"{ROLLOUT}.top_p=0.95", f"{ROLLOUT}.top_k=-1", f"{ROLLOUT}.val_kwargs.n=16", "trainer.val_only=true"),
            *(f"{ROLLOUT}.val_kwargs.do_sample=True", f"{ROLLOUT}.val_kwargs.temperature=0.6"),
            *(f"{ROLLOUT}.val_kwargs.top_p=0.7", f"{ROLLOUT}.val_kwargs.top_k=20", f"{ROLLOUT}.ignore_eos=True"),
        ],
    )
    assert (config.rollout.top_p, config.rollout.top_k, config.rollout.ignore_end_tokens) == (0.95, None, True)
    validation = config.validation
    assert (validation.samples, validation.temperature, validation.top_p, validation.top_k) == (16, 0.6, 0.7, 20)
    assert config.trainer.validate_only
    assert not [note for note in notes if "top_" in note]


@pytest.mark.parametrize("value", ["false", "False"])
def test_an_argument_of_the_chat_template_is_no_text(value: str) -> None:
    key = "data.apply_chat_template_kwargs"
    for argument in (f"+{key}.enable_thinking={value}", f"{key}={{enable_thinking: {value}}}"):
        config, _ = load_config([], [argument, "actor_rollout_ref.model.custom_chat_template=a.jinja"])
        assert config.data.chat_template_kwargs == {"enable_thinking": False}
        assert config.data.chat_template == "a.jinja"


@pytest.mark.parametrize(
    "argument",
    ["repetition_penalty=1.1", "frequency_penalty=0.5", "presence_penalty=0.5", "logprobs_mode=raw_logprobs"],
)
def test_what_changes_the_sampled_distribution_is_refused(argument: str) -> None:
    with pytest.raises(ConfigError, match="is not supported here"):
        load_config([], [f"+{ROLLOUT}.{argument}"])


def test_a_stop_string_cannot_be_split_between_segments() -> None:
    with pytest.raises(ConfigError, match="asynchronous does not support rollout"):
        load_config([], ["trainer.mode=asynchronous", "algorithm.correction=tis", "rollout.stop=[</answer>]"])


def test_engines_span_as_many_gpus_as_in_verl() -> None:
    rollout = "actor_rollout_ref.rollout"
    config, notes = load_config([], [f"{rollout}.tensor_model_parallel_size=4", f"{rollout}.data_parallel_size=2"])
    assert config.rollout.tensor_parallel == 4
    assert notes == [
        f"{rollout}.data_parallel_size has no effect: "
        "every rollout.tensor_parallel GPUs hold an engine, and the engines share the prompts"
    ]
    with pytest.raises(ConfigError, match="pipeline"):
        load_config([], [f"{rollout}.pipeline_model_parallel_size=2"])


def test_weights_in_8_bits_are_those_of_the_engines() -> None:
    key = "actor_rollout_ref.rollout.quantization"
    config, _ = load_config([], [f"{key}=fp8", "algorithm.correction=tis"])
    assert config.rollout.quantization == "fp8"
    assert load_config([], [f"{key}=null"])[0].rollout.quantization is None
    with pytest.raises(ConfigError, match=r"rollout\.quantization=torchao"):
        load_config([], [f"{key}=torchao"])


def test_drafts_from_earlier_tokens_are_those_of_vllm_s_n_grams() -> None:
    key = "actor_rollout_ref.rollout.engine_kwargs.vllm.speculative_config"
    config, _ = load_config(
        [], [f"+{key}.method=ngram", f"+{key}.num_speculative_tokens=6", f"+{key}.prompt_lookup_max=4"]
    )
    assert config.rollout.speculative_tokens == 6
    with pytest.raises(ConfigError, match=r"speculative_config\.method=eagle"):
        load_config([], [f"+{key}.method=eagle"])
    with pytest.raises(ConfigError, match="needs a number of tokens"):
        load_config([], [f"+{key}.method=ngram"])
