"""Answers to questions, compared as SQuAD does (Rajpurkar et al. 2016, arXiv:1606.05250)."""

import re
import string
from collections import Counter
from collections.abc import Mapping

from trainer.rewards.truth import as_texts

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def tagged_answer(response: str) -> str | None:
    """The content of the last `<answer>...</answer>`; None without one."""
    tagged = _TAGGED.findall(response)
    return tagged[-1].strip() if tagged else None


def accepted_answers(ground_truth: object) -> list[str]:
    """The accepted answers: text, a list, or a mapping with either under `target`."""
    return as_texts(ground_truth["target"] if isinstance(ground_truth, Mapping) else ground_truth)


def normalized(text: str) -> str:
    """Lower case, without punctuation, articles and extra white space."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact(answer: str, truth: str) -> float:
    """1.0 if both are the same words."""
    return float(normalized(answer) == normalized(truth))


def f1(answer: str, truth: str) -> float:
    """The F1 score of the answer's words."""
    given, wanted = normalized(answer).split(), normalized(truth).split()
    if not given or not wanted:
        return float(given == wanted)
    common = (Counter(given) & Counter(wanted)).total()
    return 2 * common / (len(given) + len(wanted))
