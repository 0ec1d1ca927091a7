"""Every change that Slipway makes to vLLM: its reason, the releases it was compared with, and the code it depends on.

To support a new release, run `ci/newest-vllm`: it runs the engines' tests and shows what changed in the functions named
here. Then adapt the patch, add the release to `VERSIONS`, and lock it in images/matrix.toml.

Nothing here imports vLLM before it is called: vLLM reads `settings.engine_environment` when it is imported.
"""

import json
import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from trainer.cluster.place import Team
from trainer.models.lora import named_adapters
from trainer.weights.arrival import check_count, check_in_place
from trainer.weights.buckets import checksum
from trainer.weights.in_place import CopyRecorder

# The id of the actor's adapters, the only set, in requests to vLLM.
ADAPTERS = 1
VERSIONS = ("0.26.0", "0.31.0", "0.32.0", "0.33.0")

_SCHEDULER = "v1/core/sched/scheduler.py: Scheduler"
_TESTS = "tests/trainer/rollout/vllm"


@dataclass(frozen=True, kw_only=True)
class Patch:
    """A change to vLLM, or a use of its private records.

    `because` is the code that makes it necessary: a function, as `file: name` below vLLM's package, and a part of its
    source. `test_patches.py` fails when that code is gone, because the patch may then go, too. `depends_on` names the
    functions that the patch replaces, repeats or calls, or whose records it writes. `test` compares results with and
    without the patch. `versions` are the releases whose code was compared; engines on GPUs do not use the patch if it
    is `cpu_only`.
    """

    purpose: str
    because: tuple[str, str]
    depends_on: tuple[str, ...]
    test: str
    versions: tuple[str, ...] = VERSIONS
    cpu_only: bool = False


PATCHES: Mapping[str, Patch] = {
    "decode fast path": Patch(
        purpose="plans and ends decode-only steps for all responses at once (fast_path.py, decode_run.py)",
        because=(
            f"{_SCHEDULER}.update_from_output",
            "for req_id, num_tokens_scheduled in num_scheduled_tokens.items()",
        ),
        depends_on=(
            f"{_SCHEDULER}.schedule",
            f"{_SCHEDULER}._update_after_schedule",
            f"{_SCHEDULER}._make_cached_request_data",
            f"{_SCHEDULER}.update_from_output",
            f"{_SCHEDULER}._update_request_with_output",
            f"{_SCHEDULER}._free_request",
            f"{_SCHEDULER}.get_request_counts",
            "v1/core/sched/async_scheduler.py: AsyncScheduler",
            "v1/core/sched/output.py: SchedulerOutput",
            "v1/core/sched/utils.py: check_stop",
            "v1/core/single_type_kv_cache_manager.py: SingleTypeKVCacheManager.cache_blocks",
            "v1/core/single_type_kv_cache_manager.py: FullAttentionManager",
            "v1/core/block_pool.py: BlockPool.get_new_blocks",
            "v1/request.py: Request",
        ),
        test=f"{_TESTS}/test_fast_path.py",
    ),
    "block allocation": Patch(
        purpose="skips KV-block allocation while the current block has room",
        because=(f"{_SCHEDULER}.schedule", "self.kv_cache_manager.allocate_slots("),
        depends_on=("v1/core/kv_cache_manager.py: KVCacheManager.allocate_slots",),
        test=f"{_TESTS}/test_fast_path.py",
    ),
    "plain log-probs": Patch(
        purpose="keeps a float per token instead of several objects",
        because=(
            "v1/engine/logprobs.py: LogprobsProcessor._update_sample_logprobs",
            "append_logprobs_for_next_position(",
        ),
        depends_on=(
            "v1/engine/logprobs.py: LogprobsProcessor",
            "v1/engine/output_processor.py: RequestState",
            "v1/engine/output_processor.py: OutputProcessor.process_outputs",
        ),
        test="tests/trainer/rollout/test_rollout.py",
    ),
    "steps under way": Patch(
        purpose="finishes scheduled steps before weights change or drafting starts (in_flight.py)",
        because=("v1/engine/core.py: EngineCore.step_with_batch_queue", "batch_queue.appendleft("),
        depends_on=("v1/engine/core.py: EngineCore.step_with_batch_queue", "entrypoints/llm.py: LLM.sleep"),
        test="tests/trainer/rollout/vllm/test_in_flight.py",
    ),
    "drafts, first model runner": Patch(
        purpose="verifies drafts by sampling, so that tokens equal those without drafts (verification.py)",
        because=("v1/worker/gpu_model_runner.py: GPUModelRunner._sample", "self.rejection_sampler("),
        depends_on=(
            "v1/sample/sampler.py: Sampler.forward",
            "v1/sample/metadata.py: SamplingMetadata",
            "v1/sample/rejection_sampler.py: RejectionSampler.forward",
            "v1/spec_decode/metadata.py: SpecDecodeMetadata",
            "v1/spec_decode/custom_class_proposer.py: create_custom_proposer",
        ),
        test=f"{_TESTS}/test_speculation.py",
    ),
    "drafts, second model runner": Patch(
        purpose="the same on GPUs, with drafts of our own scheduler (verification.py)",
        because=("v1/worker/gpu/model_runner.py: GPUModelRunner.sample", "self.rejection_sampler("),
        depends_on=(
            "v1/worker/gpu/model_runner.py: GPUModelRunner.execute_model",
            "v1/worker/gpu/model_runner.py: GPUModelRunner.sample",
            "v1/worker/gpu/model_runner.py: GPUModelRunner.sample_tokens",
            "v1/worker/gpu/input_batch.py: InputBatch",
            "v1/worker/gpu/states.py: RequestState",
        ),
        test="tests/gpu/test_runs.py",
    ),
    "CUDA graphs of drafts": Patch(
        purpose="captures whole steps in which responses have different numbers of tokens",
        because=("v1/worker/gpu/cudagraph_utils.py: CudaGraphManager", "uniform_token_count"),
        depends_on=(
            "v1/worker/gpu/cudagraph_utils.py: CudaGraphManager",
            "v1/worker/gpu/cudagraph_utils.py: ModelCudaGraphManager",
            "v1/worker/gpu/cudagraph_utils.py: BatchExecutionDescriptor",
        ),
        test="tests/gpu/test_runs.py",
    ),
    "weights": Patch(
        purpose="replaces weights by `reload_weights`; on CPU a tied head gets its own (weights.py, settings.py)",
        because=("model_executor/layers/utils.py: dispatch_cpu_unquantized_gemm", "layer.cpu_linear"),
        depends_on=(
            "v1/worker/gpu_model_runner.py: GPUModelRunner.reload_weights",
            "v1/worker/gpu/model_runner.py: GPUModelRunner.reload_weights",
        ),
        test="tests/trainer/rollout/test_rollout.py",
    ),
    "adapters in memory": Patch(
        purpose="loads adapters from tensors",
        because=("lora/worker_manager.py: WorkerLoRAManager._load_adapter", "from_local_checkpoint("),
        depends_on=(
            "lora/lora_model.py: LoRAModel",
            "lora/lora_weights.py: LoRALayerWeights",
            "lora/model_manager.py: LoRAModelManager.activate_adapter",
            "lora/model_manager.py: LRUCacheLoRAModelManager.add_adapter",
        ),
        test="tests/trainer/rollout/test_rollout.py",
    ),
    "shards": Patch(
        purpose="starts each rank of an engine in a process of ours, and has the ranks meet at a file of their own",
        because=("v1/executor/uniproc_executor.py: ExecutorWithExternalLauncher._distributed_args", '"env://"'),
        depends_on=("v1/executor/uniproc_executor.py: ExecutorWithExternalLauncher",),
        test="tests/trainer/rollout/test_rollout.py",
    ),
    "model class": Patch(
        purpose="registers the model's class, so that no other process imports vLLM to inspect it",
        because=("model_executor/models/registry.py: _LazyRegisteredModel.inspect_model_cls", "_run_in_subprocess("),
        depends_on=("model_executor/models/registry.py: _ModelRegistry.register_model",),
        test="tests/trainer/rollout/test_rollout.py",
    ),
    "experts": Patch(
        purpose="records the experts that tokens choose (routes.py); vLLM does so in its second model runner alone",
        because=("v1/worker/gpu/model_runner.py: GPUModelRunner.initialize_kv_cache", "get_aux_output_connector("),
        depends_on=(
            "model_executor/layers/fused_moe/routed_experts_capturer.py: bind_routed_experts_capturer",
            "v1/worker/gpu_model_runner.py: GPUModelRunner.execute_model",
            "v1/worker/gpu_model_runner.py: GPUModelRunner._update_states",
        ),
        test="tests/trainer/rollout/test_routes.py",
        versions=("0.31.0", "0.32.0"),
        cpu_only=True,
    ),
    "packed experts": Patch(
        purpose="packs experts' weights again for the kernel of CPUs when they are replaced (weights.py)",
        because=(
            "model_executor/layers/fused_moe/unquantized_fused_moe_method.py: UnquantizedFusedMoEMethod._setup_kernel",
            "if not is_weight_update:",
        ),
        depends_on=(
            "model_executor/layers/fused_moe/experts/cpu_moe.py: CPUUnquantizedExperts.process_weights_after_loading",
        ),
        test="tests/trainer/rollout/test_routes.py",
        versions=("0.31.0", "0.32.0"),
        cpu_only=True,
    ),
    "exact operators": Patch(
        purpose="computes with the trainer's operators for actor.backend=exact",
        because=("model_executor/layers/layernorm.py: RMSNorm", "rms_norm_batch_invariant("),
        depends_on=(
            "model_executor/layers/vocab_parallel_embedding.py: UnquantizedEmbeddingMethod.apply",
            "model_executor/layers/linear.py: UnquantizedLinearMethod.apply",
            "v1/attention/backends/flash_attn.py: FlashAttentionImpl.forward",
            "model_executor/determinism/batch_invariant.py: matmul_kernel_persistent",
            "_custom_ops.py: rotary_embedding",
            "v1/worker/gpu/sample/gumbel.py: apply_temperature",
            "v1/worker/gpu/sample/logprob.py: compute_token_logprobs",
        ),
        test="tests/gpu/test_exact.py",
    ),
}


def version() -> str:
    """The release of the installed vLLM, without the device that it was built for."""
    import vllm

    release: str = vllm.__version__
    return release.partition("+")[0]


def outdated(name: str) -> str | None:
    """Why the patch of that name does not hold for the installed vLLM, or None."""
    if version() in PATCHES[name].versions:
        return None
    return f"vLLM {version()} is not among the versions that it was compared with: {', '.join(PATCHES[name].versions)}"


def register_model_class(directory: Path) -> None:
    """Gives vLLM the class of the model. vLLM would otherwise inspect it in a new process, to keep CUDA out of this
    one."""
    from vllm import ModelRegistry

    for architecture in json.loads((directory / "config.json").read_text()).get("architectures") or ():
        known = ModelRegistry.models.get(architecture)
        if known is not None:
            ModelRegistry.register_model(architecture, known.load_model_cls())


def shard_executor(team: Team) -> type:
    """The executor of one rank of an engine that spans several devices.

    Every rank runs the whole engine on its part of the model. All receive the same calls in the same order and
    schedule alike, so they only exchange tensors, and each rank has the responses.
    """
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    meeting = Path(tempfile.gettempdir(), team.meeting)

    class ShardExecutor(ExecutorWithExternalLauncher):  # type: ignore[misc]
        def _distributed_args(self) -> tuple[str, int, int]:
            return f"file://{meeting}", team.rank, team.rank

    return ShardExecutor


def pack_experts(model: Any) -> None:
    """Packs the weights of experts for the kernel of CPUs after `reload_weights`: vLLM does so only when it loads them
    for the first time."""
    for layer in model.modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        if kernel is not None and layer.w13_weight.device.type == "cpu":
            kernel.fused_experts.process_weights_after_loading(layer)


class _Capturer(NamedTuple):
    """As vLLM's `RoutedExpertsCapturer`."""

    capture: Callable[[int, Tensor], None]


def capture_choices(model: Any, capture: Callable[[int, Tensor], None]) -> None:
    """Calls `capture(layer, experts)` whenever tokens of a layer have chosen experts, [tokens, choices]."""
    from vllm.model_executor.layers.fused_moe.routed_experts_capturer import bind_routed_experts_capturer

    bind_routed_experts_capturer(model, _Capturer(capture))


@cache
def _plain_log_probs_class() -> type:
    from vllm.v1.engine.logprobs import LogprobsProcessor

    class PlainLogProbs(LogprobsProcessor):  # type: ignore[misc]
        def update_from_output(self, output: Any) -> None:
            if output.new_logprobs is not None:
                self.logprobs.extend(output.new_logprobs.logprobs[:, 0].tolist())  # the sampled token comes first

    return PlainLogProbs


def plain_log_probs() -> Any:
    """A `LogprobsProcessor` whose `logprobs` is a list with the log-prob of each sampled token."""
    return _plain_log_probs_class()(
        tokenizer=None,
        logprobs=[],
        prompt_logprobs=None,
        cumulative_logprob=None,
        num_logprobs=None,
        num_prompt_logprobs=None,
    )


def has_uniform_blocks(cache: Any) -> bool:
    """Whether all layers attend to all earlier tokens, in KV blocks of one size. `cache` is a KVCacheManager."""
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

    managers = cache.coordinator.single_type_managers
    if len(managers) != 1 or type(managers[0]) is not FullAttentionManager:
        return False
    return bool(managers[0].block_size == cache.block_pool.hash_block_size)


def skip_block_allocation(cache: Any) -> None:
    """Lets `cache.allocate_slots` return at once while the current block of a request has room, if the cache has
    uniform blocks. The results are the same."""
    if not has_uniform_blocks(cache):
        return
    (manager,) = cache.coordinator.single_type_managers
    size, blocks, cached, allocate = (
        manager.block_size,
        manager.req_to_blocks,
        manager.num_cached_block,
        cache.allocate_slots,
    )

    def has_room(request: Any) -> bool:
        """Whether the next token fits, and does not fill a block that other requests may then share."""
        end = request.num_computed_tokens + 1
        if end > len(blocks.get(request.request_id, ())) * size:
            return False
        return not cache.enable_caching or end < (cached.get(request.request_id, 0) + 1) * size

    def allocate_slots(request: Any, num_new_tokens: int, num_lookahead_tokens: int = 0, **others: Any) -> Any:
        if num_new_tokens == 1 and not num_lookahead_tokens and not others and has_room(request):
            return cache.empty_kv_cache_blocks
        return allocate(request, num_new_tokens, num_lookahead_tokens=num_lookahead_tokens, **others)

    cache.allocate_slots = allocate_slots


# Tokens of a step with drafts for which there are CUDA graphs.
DRAFT_SIZES = (*range(16, 96, 16), *range(96, 256, 32), *range(256, 512, 64), *range(512, 1025, 128))


@cache
def _draft_graphs_class() -> type:
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, ModelCudaGraphManager

    class DraftGraphs(ModelCudaGraphManager):  # type: ignore[misc]
        def __init__(self, runner: Any, longest: int) -> None:
            plain = runner.cudagraph_manager
            self._longest = longest
            self._steps: list[Any] = []  # the descriptors of captured graphs, the smallest first
            super().__init__(plain.vllm_config, plain.device, CUDAGraphMode.FULL, decode_query_len=longest)
            self.capture(
                runner.model,
                runner.model_state,
                runner.input_buffers,
                runner.intermediate_tensors,
                runner.block_tables,
                runner.attn_groups,
                runner.kv_cache_config,
            )

        def _init_candidates(self) -> None:
            """vLLM's: lists the graphs to capture, the largest first."""
            largest = self.compilation_config.max_cudagraph_capture_size
            known = {field.name for field in fields(BatchExecutionDescriptor)}
            limit = {"max_query_len": self._longest} if "max_query_len" in known else {}
            for size in DRAFT_SIZES:
                # A capture has dummy responses of one token, and the last one has the others: `longest`.
                responses = size - self._longest + 1
                if 2 * self._longest <= size <= largest and responses <= self.max_num_reqs:
                    self._steps.append(BatchExecutionDescriptor(CUDAGraphMode.FULL, size, responses, **limit))
            self._capture_descs[CUDAGraphMode.FULL] = self._steps[::-1]

        def fit(self, tokens: Collection[int]) -> bool:
            return max(tokens) == self._longest and self._smallest(len(tokens), sum(tokens)) is not None

        def dispatch(self, num_reqs: int, num_tokens: int, *_arguments: Any, **_named: Any) -> Any:
            """vLLM's: the graph for a step that has one."""
            return self._smallest(num_reqs, num_tokens)

        def _smallest(self, responses: int, tokens: int) -> Any:
            needed = max(tokens, responses + self._longest - 1)
            return next((step for step in self._steps if step.num_tokens >= needed), None)

    return DraftGraphs


def draft_graphs(runner: Any, longest: int) -> Any:
    """CUDA graphs of whole steps in which each response has one to `longest` tokens, for vLLM's second model runner.

    `fit(tokens)` is whether a step with this many tokens of each response has a graph; one response must have
    `longest`. vLLM's own graphs of whole steps are for one token each. Other steps launch the attention of each layer
    one by one, which takes longer than the kernels of a small batch.
    """
    return _draft_graphs_class()(runner, longest)


def activate_adapters(runner: Any, tensors: Mapping[str, Tensor], scaling: float, is_sharded: bool) -> None:
    """Replaces the adapters of a model runner; `scaling` is alpha / rank. Raises WorkerError if they differ from what
    was sent."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.lora_weights import LoRALayerWeights

    manager = runner.lora_manager._adapter_manager
    # Scaled here and not by vLLM, so that the weights the kernels read have a checksum known in advance.
    layers = {name: (a.cpu(), b.cpu() * scaling) for name, (a, b) in named_adapters(tensors).items()}
    adapters = {name: LoRALayerWeights(name, len(a), len(a), a, b) for name, (a, b) in layers.items()}
    manager.remove_adapter(ADAPTERS)
    manager.add_adapter(LoRAModel(ADAPTERS, next(iter(adapters.values())).rank, adapters))
    with CopyRecorder() as recorder:
        manager.activate_adapter(ADAPTERS)
    given = [part for layer in layers.values() for part in layer]
    if is_sharded:
        copied = [source for _, source in recorder.copies]
        check_count(len(copied), len(given))
        given = copied
    inside = [part for layer in manager.modules.values() for part in (*layer.lora_a_stacked, *layer.lora_b_stacked)]
    check_in_place(checksum(inside), checksum(given))


def share_operators() -> None:
    """Replaces operators of vLLM's batch-invariant mode with the trainer's (`actor.backend=exact`). Call it before an
    engine is built."""
    import vllm.model_executor.layers.layernorm as norms
    import vllm.model_executor.layers.linear as products
    import vllm.model_executor.layers.vocab_parallel_embedding as heads
    import vllm.v1.attention.backends.flash_attn as attention

    from trainer.models.exact import kernels

    def norm(x: Tensor, weight: Tensor, eps: float = 1e-6, residual: Tensor | None = None) -> Any:
        return kernels.norm(x, weight, eps, residual)

    norms.rms_norm_batch_invariant = norm
    products.linear_batch_invariant = kernels.product
    heads.linear_batch_invariant = kernels.product
    attention.flash_attn_varlen_func = _at_least_two_queries(attention.flash_attn_varlen_func)
    attention.get_scheduler_metadata = _at_least_two_queries(attention.get_scheduler_metadata)


def _at_least_two_queries(function: Callable[..., Any]) -> Callable[..., Any]:
    """With `max_seqlen_q=1`, FlashAttention drops the causal mask and takes other tiles for some head widths. With 2 it
    computes a decode step as a prefill."""

    def call(*arguments: Any, **named: Any) -> Any:
        if "max_seqlen_q" in named:
            named["max_seqlen_q"] = max(2, named["max_seqlen_q"])
        return function(*arguments, **named)

    return call
