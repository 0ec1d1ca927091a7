"""The network between the nodes: what the host has, what of it training should use, and as which variables."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from entrypoints.host.accelerators import Gpu, find_gpus
from entrypoints.host.hca import find_hcas
from entrypoints.host.interfaces import INTERFACE, default_route, guess_interface
from entrypoints.host.rails import HCAS, Choice, choose
from entrypoints.host.tree import Tree

__all__ = ["Fabric", "detect_fabric"]


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """One host's adapters, GPUs and the interface on which the nodes meet."""

    choice: Choice
    gpus: tuple[Gpu, ...]
    interface: str | None
    interface_reason: str
    chosen_interface: str | None = None
    """The user's word."""

    @property
    def kind(self) -> str:
        return self.choice.kind

    def summary(self) -> dict[str, Any]:
        """What nodes compare when they meet: it must be alike on all of them."""
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
    """Look at the host below the tree's root. Raises UsageError if the user's choice cannot be met."""
    gpus = find_gpus(tree)
    wanted = variables.get(HCAS, "").strip() or None
    choice = choose(find_hcas(tree), gpus, default_route(tree), wanted)
    interface, reason = guess_interface(tree)
    said = variables.get(INTERFACE, "").strip() or None
    if said:
        interface, reason = said, f"{INTERFACE} says so"
    return Fabric(choice=choice, gpus=gpus, interface=interface, interface_reason=reason, chosen_interface=said)
