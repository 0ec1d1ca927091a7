"""The fabric, the network between nodes: adapters, GPUs and interface of this host, and how nodes differ."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from entrypoints.host.accelerators import Gpu, find_gpus
from entrypoints.host.network.hca import find_hcas
from entrypoints.host.network.interfaces import INTERFACE, default_route, guess_interface
from entrypoints.host.network.rails import HCAS, RailChoice, choose
from entrypoints.host.tree import Tree

_LABELS = {"kind": "fabric is", "hcas": "adapters are", "gid_index": "GID index is", "mtu": "MTU is", "rate": "rate is"}


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """One host's adapters and GPUs, and the interface over which the nodes meet."""

    choice: RailChoice
    gpus: tuple[Gpu, ...]
    interface: str | None
    interface_reason: str
    chosen_interface: str | None = None
    """The interface that the user named."""

    @property
    def kind(self) -> str:
        """`infiniband`, `roce`, `efa` or `ethernet`."""
        return self.choice.kind

    def summary(self) -> dict[str, Any]:
        """The values that should be equal on all nodes, which they compare when they meet."""
        return {
            "kind": self.kind,
            "hcas": [hca.name for hca in self.choice.hcas],
            "gid_index": sorted({hca.roce_v2 for hca in self.choice.hcas if hca.roce_v2 is not None}),
            "mtu": sorted({hca.mtu for hca in self.choice.hcas if hca.mtu is not None}),
            "rate": sorted({hca.rate for hca in self.choice.hcas}),
        }

    def document(self) -> dict[str, Any]:
        """For `launch explain --json`."""
        return {
            "kind": self.kind,
            "hcas": [{**asdict(hca), "pci_path": list(hca.pci_path)} for hca in self.choice.hcas],
            "excluded": [{"name": name, "reason": reason} for name, reason in self.choice.excluded],
            "gpus": [{"address": gpu.address, "architecture": gpu.architecture} for gpu in self.gpus],
        }


def detect_fabric(tree: Tree, variables: Mapping[str, str]) -> Fabric:
    """The fabric of the host in the tree. Raises UsageError if the user named an adapter that cannot be used."""
    gpus = find_gpus(tree)
    wanted = variables.get(HCAS, "").strip() or None
    choice = choose(find_hcas(tree), gpus, default_route(tree), wanted)
    interface, reason = guess_interface(tree)
    said = variables.get(INTERFACE, "").strip() or None
    if said:
        interface, reason = said, f"set by {INTERFACE}"
    return Fabric(choice=choice, gpus=gpus, interface=interface, interface_reason=reason, chosen_interface=said)


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
