"""Keys of verl's section `actor_rollout_ref.rollout`."""

from trainer.compat.verl.rules import (
    Given,
    Rule,
    Translation,
    Value,
    mapped,
    no_effect,
    no_effects,
    only,
    refused,
    same_seed,
    to,
    turns_on,
    unsupported,
    whole,
    word,
)
from trainer.compat.verl.shared import LOG_PROB_KEYS, PROFILER_KEYS, ROLLOUT, SAMPLES, TRACES
from trainer.compat.verl.subsections.dtypes import compute_type
from trainer.errors import ConfigError

_FORWARD = "actor.micro_batch_size or actor.micro_batch_tokens limits every forward pass of actor and reference"


_ENGINE_KEYS = (
    *("swap_space", "disable_mm_preprocessor_cache", "mm_processor_cache_gb", "max_num_seqs", "block_size"),
    *("enable_chunked_prefill", "disable_log_stats", "enable_log_requests", "async_scheduling", "disable_log_requests"),
    *("enable_prefix_caching", "compilation_config", "compilation_config.*", "use_inductor_graph_partition"),
)
_DRAFTS = f"{ROLLOUT}.engine_kwargs.vllm.speculative_config"
_PROMETHEUS_KEYS = ("enable", "port", "file", "served_model_name")


def samples(key: str, value: Value, _given: Given) -> Translation:
    if whole(value) is None:
        raise ConfigError(f"{key}={value}: expected a whole number", hint="it counts responses to a prompt")
    return Translation({"rollout.samples_per_prompt": value})


def holds_prompt_and_response(key: str, value: Value, given: Given) -> Translation:
    """An engine's limit has an effect in verl only if it is below prompt and response together."""
    lengths = [whole(given.get(f"data.max_{part}_length", 512)) for part in ("prompt", "response")]
    longest, limit = sum(length or 0 for length in lengths), whole(value)
    if word(value) == "null" or (limit is not None and limit >= longest):
        return Translation({})
    raise ConfigError(
        f"{key}={value} is below data.max_prompt_length plus data.max_response_length, {longest}",
        hint="lower data.max_response_length instead",
    )


def standalone_share(_key: str, value: Value, _given: Given) -> Translation:
    """The share of engines with GPUs of their own, which all engines of an asynchronous run have."""
    return Translation({} if word(value) == "null" else {"rollout.gpu_memory_utilization": value})


def top_k(ours: str) -> Rule:
    """verl's -1 and 0 mean all tokens."""

    def rule(_key: str, value: Value, _given: Given) -> Translation:
        return Translation({ours: None if word(value) in ("-1", "0") else value})

    return rule


def quantization(key: str, value: Value, _given: Given) -> Translation:
    if word(value) not in ("null", "fp8"):
        raise unsupported(key, value, ("null", "fp8"))
    return Translation({} if word(value) == "null" else {"rollout.quantization": "fp8"})


def drafting(key: str, value: Value, given: Given) -> Translation:
    """vLLM's way of drafting. It refuses n-grams without their number of tokens, too."""
    if word(value) not in ("null", "ngram"):
        raise unsupported(key, value, ("null", "ngram"))
    if word(value) == "ngram" and f"{_DRAFTS}.num_speculative_tokens" not in given:
        raise ConfigError(f"{key}={value} needs a number of tokens", hint=f"set {_DRAFTS}.num_speculative_tokens")
    return Translation({})


RULES: dict[str, Rule] = {
    f"{ROLLOUT}.name": mapped({"vllm": "vllm", "hf": "transformers"}, "rollout.engine"),
    f"{ROLLOUT}.mode": no_effect("an engine gets its whole batch at once and schedules it"),
    f"{ROLLOUT}.enable_rollout_routing_replay": no_effect("engines record experts with actor.router_replay.mode=R3"),
    f"{ROLLOUT}.n": samples,
    f"{ROLLOUT}.temperature": to("rollout.temperature"),
    f"{ROLLOUT}.top_k": top_k("rollout.top_k"),
    f"{ROLLOUT}.top_p": to("rollout.top_p"),
    f"{ROLLOUT}.min_p": to("rollout.min_p"),
    f"{ROLLOUT}.stop": to("rollout.stop"),
    f"{ROLLOUT}.include_stop_str_in_output": only("true"),
    f"{ROLLOUT}.repetition_penalty": only("1", "1.0"),
    f"{ROLLOUT}.frequency_penalty": only("0", "0.0"),
    f"{ROLLOUT}.presence_penalty": only("0", "0.0"),
    f"{ROLLOUT}.min_tokens": only("0"),
    f"{ROLLOUT}.do_sample": only("true"),
    f"{ROLLOUT}.ignore_eos": to("rollout.ignore_end_tokens"),
    f"{ROLLOUT}.gpu_memory_utilization": to("rollout.gpu_memory_utilization"),
    f"{ROLLOUT}.enforce_eager": to("rollout.enforce_eager"),
    f"{ROLLOUT}.max_num_seqs": to("rollout.max_num_seqs"),
    f"{ROLLOUT}.tensor_model_parallel_size": to("rollout.tensor_parallel"),
    f"{ROLLOUT}.data_parallel_size": no_effect(
        "every rollout.tensor_parallel GPUs hold an engine, and the engines share the prompts"
    ),
    f"{ROLLOUT}.max_model_len": holds_prompt_and_response,
    f"{ROLLOUT}.max_num_batched_tokens": no_effect("vLLM chooses it"),
    f"{ROLLOUT}.dtype": compute_type,
    **no_effects(ROLLOUT, LOG_PROB_KEYS, _FORWARD),
    f"{ROLLOUT}.calculate_log_probs": no_effect("see rollout.compare_freq"),
    f"{ROLLOUT}.free_cache_engine": no_effect("see rollout.sleep"),
    f"{ROLLOUT}.multi_stage_wake_up": no_effect("see rollout.sleep"),
    f"{ROLLOUT}.load_format": no_effect("engines take their weights from the actor"),
    f"{ROLLOUT}.layered_summon": no_effect("weights are sent in buckets"),
    f"{ROLLOUT}.update_weights_bucket_megabytes": no_effect("weights are sent in buckets"),
    f"{ROLLOUT}.enable_chunked_prefill": no_effect("vLLM chooses it"),
    f"{ROLLOUT}.enable_prefix_caching": to("rollout.prefix_caching"),
    f"{ROLLOUT}.disable_log_stats": no_effect("engine statistics are always off"),
    f"{ROLLOUT}.cudagraph_capture_sizes": no_effect("vLLM chooses them"),
    f"{ROLLOUT}.engine_kwargs.vllm.max_model_len": holds_prompt_and_response,
    **no_effects(f"{ROLLOUT}.engine_kwargs.vllm", _ENGINE_KEYS, "settings under rollout configure the engine"),
    f"{_DRAFTS}.method": drafting,
    f"{_DRAFTS}.num_speculative_tokens": to("rollout.speculative_tokens"),
    **no_effects(_DRAFTS, ("prompt_lookup_min", "prompt_lookup_max"), "a draft follows three known tokens"),
    f"{ROLLOUT}.engine_kwargs.vllm.*": refused("settings under rollout configure the engine"),
    f"{ROLLOUT}.engine_kwargs.sglang.*": no_effect("the engine is vLLM"),
    f"{ROLLOUT}.engine_kwargs.trtllm.*": no_effect("the engine is vLLM"),
    f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes": no_effect("weights are sent in buckets"),
    f"{ROLLOUT}.standalone_gpu_memory_utilization": standalone_share,
    f"{ROLLOUT}.quantization": quantization,
    f"{ROLLOUT}.skip_tokenizer_init": no_effect("prompts are sent as tokens"),
    f"{ROLLOUT}.seed": same_seed,
    f"{ROLLOUT}.full_determinism": turns_on("trainer.deterministic"),
    f"{ROLLOUT}.scheduling_policy": no_effect("an engine gets its whole batch at once and schedules it"),
    **no_effects(f"{ROLLOUT}.prometheus", _PROMETHEUS_KEYS, "metrics.jsonl and the loggers hold the metrics"),
    f"{ROLLOUT}.val_kwargs.do_sample": no_effect("validation.temperature decides, as in verl; 0 is greedy"),
    f"{ROLLOUT}.val_kwargs.temperature": to("validation.temperature"),
    f"{ROLLOUT}.val_kwargs.n": to("validation.samples"),
    f"{ROLLOUT}.val_kwargs.top_k": top_k("validation.top_k"),
    f"{ROLLOUT}.val_kwargs.top_p": to("validation.top_p"),
    f"{ROLLOUT}.val_kwargs.min_p": to("validation.min_p"),
    f"{ROLLOUT}.checkpoint_engine.backend": no_effect("see rollout.weight_transfer"),
    **no_effects(f"{ROLLOUT}.profiler", ("enable", *PROFILER_KEYS), TRACES),
    **no_effects(f"{ROLLOUT}.trace", ("backend", "token2text", "max_samples_per_step_per_worker"), SAMPLES),
    "actor_rollout_ref.nccl_timeout": to("trainer.worker_timeout"),
}
