"""The trainer's extension of vLLM's worker, which loads weights."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from trainer.rollout.vllm.patches import activate_adapters, pack_experts
from trainer.weights.arrival import checked
from trainer.weights.buckets import SentBucket
from trainer.weights.in_place import InPlaceLoader, check_layout, derive_weights
from trainer.weights.slices import joined


class WeightLoader:
    """A mix-in for vLLM's worker (`worker_extension_cls`)."""

    model_runner: Any
    parallel_config: Any
    vllm_config: Any
    _in_place: InPlaceLoader | None = None

    def replace_weights(self, buckets: Iterable[SentBucket]) -> None:
        """Replaces all weights. Raises WorkerError if a bucket is damaged.

        `reload_weights` undoes and repeats what vLLM does to weights after loading (oneDNN's prepacking on CPU);
        `model.load_weights` does not. It starts after all buckets have arrived, because an interrupted reload leaves
        layers that a later reload cannot complete.
        """
        arrived = list(buckets)
        for sent in arrived:
            checked(sent)
        self._in_place = None  # reloading may have replaced the weights that it refers to
        self.model_runner.reload_weights(
            weights_iterator=joined(weight for sent in arrived for weight in sent.open().tensors())
        )
        pack_experts(self.model_runner.get_model())

    @property
    def _is_sharded(self) -> bool:
        return int(self.parallel_config.tensor_parallel_size) > 1

    def copy_weights(self, buckets: Iterable[SentBucket], begins: bool = True, ends: bool = True) -> None:
        """Copies buckets in GPU memory straight into the model's weights, and compares checksums when an update `ends`.

        Raises WorkerError if a weight differs from what was sent, ConfigError if kernels keep experts in another
        layout. Quantised weights differ by design, so that of them only the buckets are checked; and they come at once,
        because vLLM quantises layer by layer as weights arrive.
        """
        if self.vllm_config.model_config.quantization is not None:
            self.model_runner.reload_weights(weights_iterator=joined(_cloned(buckets)))
            return
        if self._in_place is None:
            check_layout(self.model_runner.get_model())
            self._in_place = InPlaceLoader(self.model_runner.get_model(), self._is_sharded)
        self._in_place.load(buckets, begins, ends)
        if ends:
            derive_weights(self.model_runner.get_model(), self.vllm_config.model_config.dtype)

    def replace_adapters(self, buckets: Iterable[SentBucket], scaling: float) -> None:
        """Replaces the adapters; `scaling` is alpha / rank. Raises WorkerError if they differ from what was sent."""
        arrived = [checked(sent) for sent in buckets]
        tensors = {name: tensor.cpu() for bucket in arrived for name, tensor in bucket.tensors()}
        activate_adapters(self.model_runner, tensors, scaling, self._is_sharded)


def _cloned(buckets: Iterable[SentBucket]) -> Iterator[tuple[str, Tensor]]:
    """The weights by name. vLLM quantises a layer once it has all of its weights, so they must outlive their bucket."""
    for sent in buckets:
        for name, weight in checked(sent).tensors():
            yield name, weight.clone()
        del sent  # frees memory for the next bucket
