"""Names of settings that a wrong name may mean."""

from collections.abc import Iterable
from difflib import SequenceMatcher

_NEAR = 0.75
_MOST = 3


def nearest(key: str, names: Iterable[str], handicaps: Iterable[float]) -> list[str]:
    """The nearest of the names; several if they are equally near, none if nothing is near.

    A handicap lowers the similarity of its name, from 0 to 1.
    """
    scores = {name: _similarity(key, name) - handicap for name, handicap in zip(names, handicaps, strict=True)}
    best = max(scores.values(), default=0.0)
    found = [name for name, score in scores.items() if score >= max(_NEAR, best - 0.01)]
    return sorted(found, key=lambda name: -scores[name])[:_MOST]


def _similarity(key: str, name: str) -> float:
    """From 0 to 1: of the whole names, or of their last parts together with their sections."""
    if name == key:
        return 1.0
    if name.endswith(f".{key}"):
        return 0.99
    (section, _, leaf), (other_section, _, other) = key.rpartition("."), name.rpartition(".")
    sections = _ratio(section, other_section) if section else 1.0
    words, others = leaf.split("_"), other.split("_")
    found = [_ratio(key, name), (0.6 * _ratio(leaf, other) + 0.4 * sections) if section else 0.95 * _ratio(leaf, other)]
    if leaf == other:  # the right name in the wrong section
        found.append(0.8 + 0.15 * sections)
    elif len(leaf) > 1 and (leaf == "".join(word[:1] for word in others) or set(words) < set(others)):
        found.append(0.73 + 0.2 * sections)  # lr is learning_rate, max_length a part of max_prompt_length
    return max(found)


def _ratio(text: str, other: str) -> float:
    matcher = SequenceMatcher(None, text, other)
    return matcher.ratio() if matcher.real_quick_ratio() > 0.5 else 0.0
