"""A reward model: a sequence classifier that scores how good a response is."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor

from trainer.config.sections.data import DataConfig
from trainer.config.tree import Config
from trainer.data.formats.chat_template import conversation_text
from trainer.errors import DataError
from trainer.models.files import reads_tokens
from trainer.models.pretrained import load_classifier, read_tokenizer
from trainer.rewards.answer import Answer


class RewardModel:
    """Scores prompts and responses on one device. Raises DataError if the model has no trained head with one label."""

    def __init__(self, config: Config, device: torch.device) -> None:
        settings = config.reward.model
        assert settings.path is not None
        self._path = settings.path
        self._device = device
        self._rows = settings.micro_batch_size
        self._model = _load(settings.path, getattr(torch, settings.dtype or config.model.dtype_on(device.type))).to(
            device
        )
        text_config = self._model.config.get_text_config()
        self._positions = settings.max_length or getattr(text_config, "max_position_embeddings", None)
        self._vocabulary = int(text_config.vocab_size)
        self._tokenizer = read_tokenizer(settings.path)
        self._reads_tokens = reads_tokens(config)

    def score(self, answers: Sequence[Answer]) -> list[float]:
        """The classifier's logit for each answer, in order."""
        texts = [self._tokens(answer)[-(self._positions or 0) :] for answer in answers]
        scores = torch.zeros(len(texts))
        order = sorted(range(len(texts)), key=lambda row: len(texts[row]))  # texts of similar length share a pass
        for start in range(0, len(order), self._rows):
            rows = order[start : start + self._rows]
            scores[rows] = self._forward([texts[row] for row in rows])
        return list(map(float, scores.tolist()))

    @torch.no_grad()
    def _forward(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """The logits, [texts] float32."""
        longest = max(map(len, texts))
        padding = self._padding(texts)
        tokens = torch.tensor([[*text, *[padding] * (longest - len(text))] for text in texts])
        mask = torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in texts])
        # Decoders score at the last token that differs from the padding token.
        self._model.config.get_text_config().pad_token_id = padding
        logits = self._model(input_ids=tokens.to(self._device), attention_mask=mask.to(self._device)).logits
        return logits.squeeze(-1).float().cpu()

    def _padding(self, texts: Sequence[Sequence[int]]) -> int:
        """A token that no text contains. The tokenizer's own may be the end token, which is the one to score at."""
        used = {token for text in texts for token in text}
        pad_token_id = self._tokenizer.pad_token_id
        if pad_token_id is not None and pad_token_id not in used:
            return int(pad_token_id)
        return next(token for token in range(self._vocabulary) if token not in used)

    def _tokens(self, answer: Answer) -> list[int]:
        if self._reads_tokens:
            return [*answer.prompt_ids, *answer.response_ids]
        if self._tokenizer.chat_template is None:  # as a pair: such models are trained on pairs
            return list(self._tokenizer(answer.messages[-1]["content"], answer.response)["input_ids"])
        messages = [*answer.messages, {"role": "assistant", "content": answer.response}]
        try:
            text = conversation_text(messages, self._tokenizer, DataConfig(), opening=False)
        except (TemplateError, ValueError) as error:
            raise DataError(
                f"{self._path}: the reward model's chat template rejects this prompt: {error}",
                hint="give its tokenizer a chat_template that accepts it, or set reward.model.input=tokens",
            ) from error
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def _load(path: Path, dtype: torch.dtype) -> Any:
    model, missing = load_classifier(path, dtype)
    if missing:
        raise DataError(
            f"reward.model.path={path}: its weights lack {', '.join(sorted(missing)[:3])}: its scores would be random",
            hint="use a model that was trained to score and was saved with its head",
        )
    return model.eval()
