"""Do all nodes have the same network? The odd one is named before training finds it the hard way."""

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

_LABELS = {"kind": "fabric is", "hcas": "adapters are", "gid_index": "GID index is", "mtu": "MTU is", "rate": "rate is"}


def odd_ones(summaries: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Sentences about the nodes whose summary differs from what most nodes have; of two halves the first counts.

    `summaries` maps a node's name to `Fabric.summary()`, in order of rank. They come from other nodes: any value may be
    missing.
    """
    found = []
    for key, label in _LABELS.items():
        values = {name: json.dumps(summary.get(key)) for name, summary in summaries.items()}
        usual, count = Counter(values.values()).most_common(1)[0]
        found += [
            f"{name}: its {label} {_plain(value)}, but {_plain(usual)} on {count} of {len(values)} nodes"
            for name, value in values.items()
            if value != usual
        ]
    return found


def _plain(value: str) -> str:
    document = json.loads(value)
    if isinstance(document, list):
        return ", ".join(f"{item:g}" if isinstance(item, float) else str(item) for item in document) or "none"
    return str(document)
