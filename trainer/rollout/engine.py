"""What every rollout engine can do, and which one a machine has."""

import importlib.util
from collections.abc import Iterable, Sequence
from typing import Protocol

from trainer.config.tree import Config
from trainer.errors import ConfigError
from trainer.rollout.sampling import Request, Response
from trainer.weights.buckets import SentBucket


class Engine(Protocol):
    """Samples from random weights until they are replaced. Sampling is exact: no top-k, no top-p, no penalties.

    With adapters it has the frozen weights, from the model's directory, and gets the adapters alone.
    """

    def generate(self, requests: Sequence[Request]) -> list[Response]:
        """One response per request, in their order. The same requests and weights give the same responses."""
        ...

    def replace_weights(self, buckets: Iterable[SentBucket]) -> None:
        """Samples from these weights from now on; they are all that the actor trains. Raises WorkerError."""
        ...

    def copy_weights(self, buckets: Iterable[SentBucket]) -> None:
        """The same with weights that lie in the memory of the engine's GPU, one that has two names under one of them.

        Drops each bucket before it asks for the next.
        """
        ...

    def sleep(self) -> None:
        """Gives the GPU's memory to others until the next weights come."""
        ...


def chosen_engine(setting: str) -> tuple[str, str]:
    """The engine to use here, `vllm` or `transformers`, and why. Raises ConfigError for one that is not installed."""
    has_vllm = importlib.util.find_spec("vllm") is not None
    if setting == "auto":
        return ("vllm", "vLLM is installed") if has_vllm else ("transformers", "vLLM is not installed")
    if setting == "vllm" and not has_vllm:
        raise ConfigError(
            "rollout.engine=vllm: vLLM is not installed here", hint="install it, or set rollout.engine=transformers"
        )
    return setting, f"rollout.engine={setting}"


def open_engine(name: str, config: Config, device: str, end_token_ids: Sequence[int]) -> Engine:
    """Starts an engine in this process, which imports what it needs."""
    if name == "vllm":
        from trainer.rollout.vllm import VllmEngine

        return VllmEngine(config, device, end_token_ids)
    from trainer.rollout.transformers import TransformersEngine

    return TransformersEngine(config, device, end_token_ids)
