"""vLLM as the rollout engine. It reads `trainer.rollout.process_environment` when it is imported."""

from collections.abc import Iterable, Sequence

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput

from trainer.config.tree import Config
from trainer.errors import WorkerError
from trainer.rollout.sampling import Request, Response
from trainer.rollout.vllm_settings import device_settings, weight_settings
from trainer.rollout.weight_loader import ADAPTERS
from trainer.weights.buckets import SentBucket


class VllmEngine:
    """An engine with random weights until they are replaced. Sampling is exact: no top-k, no top-p, no penalties.

    With adapters it loads the model, and what comes from the actor are the adapters alone: vLLM computes with them
    beside the frozen weights, as the actor does. Without them it refuses to sample.
    """

    def __init__(self, config: Config, device: str, end_token_ids: Sequence[int]) -> None:
        self._rollout = config.rollout
        self._max_response_length = config.data.max_response_length
        self._end_token_ids = list(end_token_ids)
        self._sleeps = config.rollout.sleep and device == "cuda"
        self._asleep = False
        self._lora = config.actor.lora if config.actor.lora.rank else None
        # No file: the worker has them by their number, or it is an error.
        self._adapters = LoRARequest("actor", ADAPTERS, "/adapters/come/from/the/actor") if self._lora else None
        self._engine = LLM(
            model=str(config.model.directory),
            dtype=config.model.dtype,
            seed=config.trainer.seed,
            max_model_len=config.data.max_prompt_length + config.data.max_response_length,
            max_num_seqs=config.rollout.max_num_seqs,
            enforce_eager=config.rollout.eager_on(device),
            enable_sleep_mode=self._sleeps,
            # Cached blocks would outlive the weights that made them.
            enable_prefix_caching=False,
            # Log-probs of the distribution that was sampled from, temperature included.
            logprobs_mode="processed_logprobs",
            worker_extension_cls="trainer.rollout.weight_loader.WeightLoader",
            skip_tokenizer_init=True,
            disable_log_stats=True,
            **weight_settings(config, device),
            **device_settings(config, device),
        )

    def generate(self, requests: Sequence[Request]) -> list[Response]:
        """One response per request, in their order. The same requests and weights give the same responses."""
        if not requests:
            return []
        sampling = [self._sampling(request) for request in requests]
        prompts = [{"prompt_token_ids": list(request.prompt)} for request in requests]
        outputs = self._engine.generate(prompts, sampling, use_tqdm=False, lora_request=self._adapters)
        return [_response(output.outputs[0]) for output in outputs]

    def _sampling(self, request: Request) -> SamplingParams:
        return SamplingParams(
            temperature=request.temperature,
            seed=request.seed if request.temperature > 0 else None,
            max_tokens=request.max_tokens or self._max_response_length,
            stop_token_ids=None if self._rollout.ignore_end_tokens else self._end_token_ids,
            ignore_eos=self._rollout.ignore_end_tokens,
            # Of the sampled token only; costs a pass over the vocabulary, and an object per token on the way back.
            logprobs=0 if self._rollout.log_probs else None,
            detokenize=False,
        )

    def replace_weights(self, buckets: Iterable[SentBucket]) -> None:
        """Samples from these weights from now on; they are all that the actor trains."""
        self._load("replace", buckets)

    def copy_weights(self, buckets: Iterable[SentBucket]) -> None:
        """The same with weights that lie in the memory of the engine's GPU."""
        self._load("copy", buckets)

    def _load(self, verb: str, buckets: Iterable[SentBucket]) -> None:
        self._wake("weights")
        if self._lora:
            self._engine.collective_rpc("replace_adapters", args=(buckets, self._lora.alpha / self._lora.rank))
        else:
            self._engine.collective_rpc(f"{verb}_weights", args=(buckets,))
        self._wake("kv_cache")

    def sleep(self) -> None:
        """Gives the GPU's memory to others until the next weights come."""
        if self._sleeps and not self._asleep:
            # Weights that will have changed are forgotten, frozen ones wait in the node's memory.
            self._engine.sleep(level=1 if self._lora else 2)
            self._asleep = True

    def _wake(self, tag: str) -> None:
        if self._asleep:
            self._engine.wake_up(tags=[tag])
            self._asleep = tag != "kv_cache"


def _response(output: CompletionOutput) -> Response:
    token_ids = tuple(output.token_ids)
    if not token_ids:
        raise WorkerError("the rollout engine returned a response without tokens")
    ended = output.finish_reason == "stop"
    if output.logprobs is None:
        return Response(token_ids, None, ended)
    log_probs = tuple(entry[token].logprob for entry, token in zip(output.logprobs, token_ids, strict=True))
    return Response(token_ids, log_probs, ended)
