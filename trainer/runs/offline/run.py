"""What DPO, KTO and SFT runs have in common."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from trainer.config.offline import OfflineConfig
from trainer.config.sections.data import DataConfig
from trainer.data.batches.batch import Batch
from trainer.data.completions import Completion
from trainer.data.dataset import PromptSampler, check_files
from trainer.data.formats.chat_template import use_chat_template
from trainer.data.published.by_name import with_local_data
from trainer.data.subset import Subset
from trainer.models.files import check_models, load_tokenizer, with_local_models
from trainer.models.weight_files import check_weights
from trainer.records.console import Column
from trainer.runs.checkpoints.manifest import TrainingState
from trainer.runs.interfaces import ActorRole, ReferenceRole
from trainer.runs.loop import run
from trainer.runs.reproduction.writer import Repeat
from trainer.runs.session import RunKind, Session
from trainer.runs.step import Metrics, Progress

Example = TypeVar("Example")
Learned = TypeVar("Learned", contravariant=True)


class Method(Protocol[Learned]):
    """How a kind of run learns from its examples."""

    def learn(self, examples: Sequence[Learned]) -> tuple[Batch, Metrics]:
        """The batch with advantages for an optimizer step, and metrics."""
        ...

    def measure(self, examples: Sequence[Learned]) -> Metrics:
        """Metrics of held-out examples."""
        ...


class OfflineStep(Generic[Example]):
    """Takes an optimizer step on each batch of examples. `also` are metrics of the update under a second name."""

    def __init__(
        self,
        session: Session,
        sampler: PromptSampler,
        training: Sequence[Example],
        validation: Sequence[Example],
        method: Method[Example],
        also: Mapping[str, str],
    ) -> None:
        self._actor, self._passes, self._phase = session.workers.training.actor, session.passes, session.tracker.phase
        self._sampler, self._training, self._validation = sampler, training, validation
        self._method, self._also = method, also

    def take(self, number: int, progress: Progress) -> Metrics:
        """One optimizer step on a batch of examples; its metrics."""
        started = time.perf_counter()
        batch, metrics = self._method.learn([self._training[index] for index in self._sampler.next_batch()])
        with progress.updating(number, metrics):
            metrics |= self._passes.update("update_actor", self._actor, batch, len(batch))
            metrics |= {name: metrics[known] for name, known in self._also.items()}
        seconds = time.perf_counter() - started
        throughput = int(batch.lengths.sum()) / seconds
        return {**metrics, "time/step": seconds, "throughput/tokens_per_second": throughput}

    def validate(self, _number: int) -> Metrics:
        """Metrics of the held-out examples, if there are any."""
        if not self._validation:
            return {}
        with self._phase("validate"):
            return self._method.measure(self._validation)

    def begin(self, resumed: TrainingState | None) -> None:
        if resumed is not None:
            self._sampler.load_state_dict(resumed.sampler)

    def state(self) -> dict[str, Any]:
        return {"sampler": self._sampler.state_dict()}

    def snapshot(self) -> Callable[[], None]:
        return partial(self._sampler.load_state_dict, self._sampler.state_dict())


class Comparison:
    """The log-probs of the policy and of its reference, which is the policy without its adapters if it has some."""

    def __init__(self, session: Session) -> None:
        groups = session.workers.training
        self._actor, self._reference, self._passes = groups.actor, groups.reference or groups.actor, session.passes

    def compare(self, completions: Sequence[Completion]) -> Batch:
        """One row per completion, with both log-probs."""
        batch, forward = completion_batch(completions), self._passes.forward
        log_probs = forward("old_log_prob", self._actor, ActorRole.log_probs, batch)
        batch = batch.with_(old_log_probs=log_probs)
        log_probs = forward("reference", self._reference, ReferenceRole.reference_log_probs, batch)
        return batch.with_(reference_log_probs=log_probs)


def completion_batch(completions: Sequence[Completion]) -> Batch:
    """One row per completion; the mask marks the tokens that are learned."""
    columns = ((completion.prompt, completion.response, completion.learned) for completion in completions)
    prompts, responses, masks = zip(*columns, strict=True)
    return Batch.from_responses(prompts, responses, None, masks)


def train_offline(
    given: OfflineConfig,
    columns: Sequence[Column],
    read: Callable[[Sequence[Path], Any, DataConfig, Subset], Sequence[Example]],
    method: Callable[[Session], Method[Example]],
    repeat: Repeat | None = None,
    validates: bool = True,
    also: Mapping[str, str] = {},
) -> Path:
    """Runs an offline method; the run's directory. `read` reads examples from files; `validates`: held-out files are
    needed. See `OfflineStep` and `trainer.runs.loop.run`.
    """

    def prepare() -> RunKind[OfflineStep[Example]]:
        check_files(given.data, ["train_files", "validation_files"] if validates else ["train_files"])
        config = with_local_data(with_local_models(given.for_workers()))
        check_models(config, given.row_limit)
        check_weights(config)
        data, seed = config.data, config.trainer.seed
        tokenizer = use_chat_template(load_tokenizer(config.model), data)
        training = read(data.train_files, tokenizer, data, Subset.of_training(data, seed))
        validation = read(data.validation_files, tokenizer, data, Subset.of_validation(data, seed))
        sampler = PromptSampler.of(data, config.trainer, len(training))

        @contextmanager
        def open_steps(session: Session) -> Iterator[OfflineStep[Example]]:
            yield OfflineStep(session, copy(sampler), training, validation, method(session), also)

        separate = config.needs_reference and not config.actor_is_reference
        roles = ["actor", "reference"] if separate else ["actor"]
        return RunKind(config, roles, len(training), open_steps, columns, records_given=True)

    return run(given, prepare, repeat)
