"""Compares the nodes' networks when they meet, and names the nodes that differ."""

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

_LABELS = {"kind": "fabric is", "hcas": "adapters are", "gid_index": "GID index is", "mtu": "MTU is", "rate": "rate is"}


def odd_ones(summaries: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A sentence for each value in which a node differs from most nodes. In a tie the first node's value wins.

    `summaries` maps each node's name to its `Fabric.summary()`, in order of rank. Other nodes sent them, so any value
    may be missing.
    """
    differences = []
    for key, label in _LABELS.items():
        values = {name: json.dumps(summary.get(key)) for name, summary in summaries.items()}
        usual, count = Counter(values.values()).most_common(1)[0]
        differences += [
            f"{name}: its {label} {_plain(value)}, but {_plain(usual)} on {count} of {len(values)} nodes"
            for name, value in values.items()
            if value != usual
        ]
    return differences


def _plain(value: str) -> str:
    document = json.loads(value)
    if isinstance(document, list):
        return ", ".join(f"{item:g}" if isinstance(item, float) else str(item) for item in document) or "none"
    return str(document)
