"""The trainer's extension of vLLM's worker, which loads weights."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights

from trainer.models.lora import named_adapters
from trainer.weights.arrival import check_count, check_in_place, checked
from trainer.weights.buckets import SentBucket, checksum
from trainer.weights.in_place import CopyRecorder, InPlaceLoader

# The id of the actor's adapters, the only set, in requests to vLLM.
ADAPTERS = 1


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
            weights_iterator=(weight for sent in arrived for weight in sent.open().tensors())
        )

    @property
    def _sharded(self) -> bool:
        return int(self.parallel_config.tensor_parallel_size) > 1

    def copy_weights(self, buckets: Iterable[SentBucket], begins: bool = True, ends: bool = True) -> None:
        """Copies buckets in GPU memory straight into the model's weights, and compares checksums when an update `ends`.

        Raises WorkerError if a weight differs from what was sent. Quantised weights differ by design, so that of them
        only the buckets are checked; and they come at once, because vLLM quantises layer by layer as weights arrive.
        """
        if self.vllm_config.model_config.quantization is not None:
            self.model_runner.reload_weights(weights_iterator=_cloned(buckets))
            return
        self._in_place = self._in_place or InPlaceLoader(self.model_runner.get_model(), self._sharded)
        self._in_place.load(buckets, begins, ends)

    def replace_adapters(self, buckets: Iterable[SentBucket], scaling: float) -> None:
        """Replaces the adapters; `scaling` is alpha / rank. Raises WorkerError if they differ from what was sent."""
        arrived = [checked(sent) for sent in buckets]
        self._activate({name: tensor.cpu() for bucket in arrived for name, tensor in bucket.tensors()}, scaling)

    def _activate(self, tensors: dict[str, Tensor], scaling: float) -> None:
        manager = self.model_runner.lora_manager._adapter_manager
        # Scaled here and not by vLLM, so that the weights the kernels read have a checksum known in advance.
        layers = {name: (a.cpu(), b.cpu() * scaling) for name, (a, b) in named_adapters(tensors).items()}
        adapters = {name: LoRALayerWeights(name, len(a), len(a), a, b) for name, (a, b) in layers.items()}
        manager.remove_adapter(ADAPTERS)
        manager.add_adapter(LoRAModel(ADAPTERS, next(iter(adapters.values())).rank, adapters))
        with CopyRecorder() as recorder:
            manager.activate_adapter(ADAPTERS)
        given = [part for layer in layers.values() for part in layer]
        if self._sharded:
            copied = [source for _, source in recorder.copies]
            check_count(len(copied), len(given))
            given = copied
        inside = [part for layer in manager.modules.values() for part in (*layer.lora_a_stacked, *layer.lora_b_stacked)]
        check_in_place(checksum(inside), checksum(given))


def _cloned(buckets: Iterable[SentBucket]) -> Iterator[tuple[str, Tensor]]:
    """The weights by name. vLLM quantises a layer once it has all of its weights, so they must outlive their bucket."""
    for sent in buckets:
        for name, weight in checked(sent).tensors():
            yield name, weight.clone()
        del sent  # frees memory for the next bucket
