"""Transformers as the rollout engine: slower than vLLM, but available wherever the trainer runs."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from trainer.algorithms.truncation import WHOLE, Truncation, truncated
from trainer.config.tree import Config
from trainer.data.batches.routes import smallest_type
from trainer.models.lora import adapter_parameters, add_adapters
from trainer.models.pretrained import load_language_model, random_language_model, read_tokenizer
from trainer.models.routers import Routers
from trainer.rollout.engine import EngineRow
from trainer.rollout.occupancy import Drafts, Load
from trainer.rollout.sampling import Response, SamplingRequest, segments_of
from trainer.weights.arrival import check_complete, check_in_place, checked
from trainer.weights.buckets import Bucket, SentBucket, checksum


class TransformersEngine:
    """Decodes up to `rollout.max_num_seqs` responses in parallel with a key-value cache; see `RolloutEngine`."""

    def __init__(self, config: Config, device: str, end_token_ids: Sequence[int]) -> None:
        self._rollout = config.rollout
        self._max_response_length = config.data.max_response_length
        self._device = torch.device(device)
        self._end_tokens = torch.tensor([] if config.rollout.ignore_end_tokens else end_token_ids, device=device)
        self._with_adapters = config.engines_apply_adapters
        self._tokenizer: Any = None
        if config.rollout.stop:
            self._tokenizer = read_tokenizer(config.model.directory)
        self._model = _model(config, device).to(self._device).eval()
        self._routers = Routers(self._model.get_decoder())
        self._load = Load(0, 0)
        # Of the update under way: the weights that arrived, by their identity, and their checksum.
        self._arrived: set[int] = set()
        self._sent_sum = 0

    def generate(self, requests: Sequence[SamplingRequest]) -> list[Response]:
        """See `RolloutEngine.generate`."""
        size = self._rollout.max_num_seqs
        parts = [requests[start : start + size] for start in range(0, len(requests), size)]
        return [response for part in parts for response in self._decode(part)]

    @torch.inference_mode()
    def _decode(self, requests: Sequence[SamplingRequest]) -> list[Response]:
        limits = torch.tensor([request.max_tokens or self._max_response_length for request in requests])
        tokens, mask = _left_padded([request.prompt for request in requests], self._device)
        temperatures = torch.tensor([request.temperature for request in requests], device=self._device)
        uniforms = _uniforms(requests, int(limits.max())).to(self._device)
        truncations = [request.truncation for request in requests]
        endings = torch.zeros(len(requests), dtype=torch.bool, device=self._device)
        active = torch.ones(len(requests), dtype=torch.bool, device=self._device)
        limits, cache = limits.to(self._device), DynamicCache()
        stops = StopStrings(self._tokenizer, self._rollout.stop, requests) if self._rollout.stop else None
        chosen, log_probs, lengths = [], [], torch.zeros_like(limits)
        records = any(request.record_from is not None for request in requests)
        routes: list[Tensor] = []  # of each pass, [rows, tokens, layers, choices]
        prompt_lengths = mask.sum(dim=1)
        for step in range(uniforms.shape[1]):
            positions = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
            self._routers.begin()
            output = self._model(
                tokens, mask, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1
            )
            if records:
                routes.append(self._routers.chosen().unflatten(0, tokens.shape))
            token, log_prob = sample(output.logits[:, -1], temperatures, uniforms[:, step], truncations)
            chosen.append(token)
            log_probs.append(log_prob)
            lengths += active
            ended = torch.isin(token, self._end_tokens)
            if stops is not None:
                ended |= stops.completed_by(token)
            endings |= ended & active
            active &= ~ended & (lengths < limits)
            in_flight = torch.stack([active, (prompt_lengths + lengths) * active]).sum(dim=1)
            self._load = Load(*in_flight.tolist())
            if not self._load.running:
                break
            tokens, mask = token.unsqueeze(1), torch.nn.functional.pad(mask, (0, 1), value=1)
        sampled = torch.stack(chosen, dim=1).tolist(), torch.stack(log_probs, dim=1).tolist()
        rows = zip(requests, *sampled, lengths.tolist(), endings.tolist(), strict=True)
        # Finished rows were decoded with the rest; the surplus is cut off.
        responses = [
            Response(tuple(tokens[:length]), tuple(values[:length]) if request.log_probs else None, ended)
            for request, tokens, values, length, ended in rows
        ]
        return self._with_routes(requests, responses, routes) if records else responses

    def _with_routes(
        self, requests: Sequence[SamplingRequest], responses: Sequence[Response], routes: Sequence[Tensor]
    ) -> list[Response]:
        """The responses with their experts; `routes` are those of each pass, [rows, tokens, layers, choices]."""
        choices = torch.cat(list(routes), dim=1).cpu().numpy().astype(smallest_type(self._routers.experts))
        longest = max(len(request.prompt) for request in requests)
        recorded = []
        for row, request, response in zip(choices, requests, responses, strict=True):
            of_row = row[longest - len(request.prompt) :][: len(request.prompt) + len(response.token_ids) - 1]
            recorded.append(replace(response, routes=segments_of(request, 0, of_row)))
        return recorded

    def replace_weights(self, buckets: Iterable[SentBucket]) -> None:
        """See `RolloutEngine.replace_weights`."""
        self._take(buckets, begins=True)
        self._check_complete()

    def copy_weights(self, buckets: Iterable[SentBucket], begins: bool = True, ends: bool = True) -> None:
        """See `RolloutEngine.copy_weights`."""
        self._take(buckets, begins)
        if ends:
            weights = self._check_complete()
            check_in_place(checksum({id(weight): weight for weight in weights.values()}.values()), self._sent_sum)

    def _take(self, buckets: Iterable[SentBucket], begins: bool) -> None:
        """Copies buckets into the model."""
        if begins:
            self._model.to(self._device)  # `sleep` may have moved frozen weights to the CPU
            self._arrived, self._sent_sum = set(), 0
        weights = self._replaceable()
        for sent in buckets:
            bucket = checked(sent)
            self._arrived |= _copy(bucket, weights)
            self._sent_sum += _sum(bucket)
            del sent, bucket  # frees memory for the next bucket

    def _check_complete(self) -> dict[str, Tensor]:
        """The weights that the actor sends. Raises WorkerError if one did not arrive in this update."""
        weights = self._replaceable()
        check_complete(weights, {name for name, weight in weights.items() if id(weight) in self._arrived})
        return weights

    def _replaceable(self) -> dict[str, Tensor]:
        """The weights that the actor sends, by the names it sends them under."""
        if self._with_adapters:
            return dict(adapter_parameters(self._model))
        stored = self._model.state_dict().keys()
        buffers = {name: buffer for name, buffer in self._model.named_buffers() if name in stored}
        return dict(self._model.named_parameters(remove_duplicate=False)) | buffers

    def take_drafts(self) -> Drafts:
        """See `RolloutEngine.take_drafts`."""
        return Drafts()

    def load(self) -> Load:
        """See `RolloutEngine.load`."""
        return self._load

    def notices(self) -> list[str]:
        """See `RolloutEngine.notices`."""
        return []

    def sleep(self) -> None:
        """See `RolloutEngine.sleep`."""
        if self._rollout.sleep and self._device.type == "cuda":
            if self._with_adapters:
                self._model.to("cpu")  # the next update replaces the adapters only
            else:
                for weight in self._model.parameters():
                    weight.data = weight.data.new_empty(0)
            torch.cuda.empty_cache()


def _model(config: Config, device: str) -> nn.Module:
    """The model before the first weights arrive.

    Frozen weights are loaded from disk. All others stay random, so that a missing weight shows at once.
    """
    directory, lora = config.model.directory, config.actor.lora
    dtype = getattr(torch, config.model.dtype_on(device))
    if not config.engines_apply_adapters:
        return random_language_model(directory, dtype)
    model = load_language_model(directory, dtype)
    add_adapters(model, lora, config.trainer.seed)
    return model.to(dtype)


def _sum(bucket: Bucket) -> int:
    """Checksum of the bucket's weights, in the form that `check_in_place` compares."""
    return checksum(tensor for _, tensor in bucket.tensors())


@torch.no_grad()
def _copy(bucket: Bucket, weights: Mapping[str, Tensor]) -> set[int]:
    """Replaces an engine's weights with the bucket's and returns the ids of the replaced parameters.

    Ids, not names: a tied weight may arrive under only one of its names.
    """
    names = set()
    for name, tensor in bucket.tensors():
        weights[name].data = tensor.to(weights[name].device, copy=True)
        names.add(name)
    return {id(weights[name]) for name in names}


def sample(
    logits: Tensor, temperatures: Tensor, uniforms: Tensor, truncations: Sequence[Truncation] = ()
) -> tuple[Tensor, Tensor]:
    """One token per row and its log-prob after temperature and truncation. Temperature 0 takes the most likely token.

    Args:
        logits: [rows, vocabulary]; temperatures: [rows]; uniforms: [rows] float64 in [0, 1); truncations: one for each
            row, or none.

    Returns:
        tokens [rows] int64, log-probs [rows] float32.
    """
    greedy = temperatures == 0
    log_probs = (logits.float() / temperatures.masked_fill(greedy, 1.0).unsqueeze(1)).log_softmax(dim=1)
    if any(truncation != WHOLE for truncation in truncations):
        log_probs = truncated(log_probs, truncations)
    cumulative = log_probs.double().exp().cumsum(dim=1)
    sampled = torch.searchsorted(cumulative, (uniforms * cumulative[:, -1]).unsqueeze(1), right=True).squeeze(1)
    tokens = torch.where(greedy, log_probs.argmax(dim=1), sampled.clamp(max=logits.shape[1] - 1))
    return tokens, log_probs.gather(1, tokens.unsqueeze(1)).squeeze(1)


class StopStrings:
    """Finds `rollout.stop` in the text of responses while they are sampled."""

    def __init__(self, tokenizer: Any, stops: Sequence[str], requests: Sequence[SamplingRequest]) -> None:
        self._tokenizer, self._stops = tokenizer, stops
        # A token has at least one byte, so a stop string that the last token completes lies within these.
        longest = 1 + max(len(stop.encode()) for stop in stops)
        begun = [request.prompt[len(request.prompt) - request.begun :] for request in requests]
        self._tails = [deque(tokens, maxlen=longest) for tokens in begun]

    def completed_by(self, sampled: Tensor) -> Tensor:
        """Whether the responses end in a stop string, or shortly after it, with the tokens [rows] sampled last: [rows]
        bool."""
        for tail, token in zip(self._tails, sampled.tolist(), strict=True):
            tail.append(token)
        texts = self._tokenizer.batch_decode([list(tail) for tail in self._tails])
        completed = [any(stop in text for stop in self._stops) for text in texts]
        return torch.tensor(completed, device=sampled.device)


def _uniforms(requests: Sequence[SamplingRequest], length: int) -> Tensor:
    """Random numbers in [0, 1) for each response, drawn from its own seed, [rows, length] float64."""
    return torch.stack(
        [
            torch.rand(length, generator=torch.Generator().manual_seed(request.seed), dtype=torch.float64)
            for request in requests
        ]
    )


def _left_padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Prompts padded on the left with 0, and their attention mask, both [rows, longest] int64."""
    longest = max(len(prompt) for prompt in prompts)
    tokens = torch.zeros(len(prompts), longest, dtype=torch.int64)
    mask = torch.zeros_like(tokens)
    for row, prompt in enumerate(prompts):
        tokens[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    return tokens.to(device), mask.to(device)


ROW = EngineRow(TransformersEngine, package="transformers", preference=0, records_routes=True)
