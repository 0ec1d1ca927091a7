"""The choice of rails: the adapters that carry the training's traffic, ordered by the GPUs next to them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from entrypoints.errors import UsageError
from entrypoints.host.accelerators import Gpu
from entrypoints.host.network.hca import Hca
from entrypoints.host.tree import natural

HCAS = "SLIPWAY_HCAS"
"""The user's choice: names to use, or names to leave out after `^`; `none` disables RDMA."""

_INACTIVE = "the port is not active"
_SAME_ROOT, _SAME_SOCKET, _ELSEWHERE = 100, 200, 300
_SLOW = 0.5
"""An adapter is not a rail if its rate is at most this share of the fastest adapter's."""


@dataclass(frozen=True)
class RailChoice:
    """The rails of a host, and the adapters that were left out."""

    kind: str
    """`infiniband`, `roce`, `efa` or `ethernet`."""
    hcas: tuple[Hca, ...]
    """The rails, in order."""
    excluded: tuple[tuple[str, str], ...]
    """The other adapters, each with the rule that excluded it. Names include the port if an adapter has several."""

    @property
    def unused(self) -> str:
        """The active adapters with the rules that excluded them, if RDMA is off although there are some; else empty."""
        active = [f"{name}: {rule}" for name, rule in self.excluded if rule != _INACTIVE]
        return "; ".join(active) if not self.hcas else ""


def choose(hcas: Sequence[Hca], gpus: Sequence[Gpu], default_route: str | None, wanted: str | None) -> RailChoice:
    """The rails after applying all rules. The user's choice (`wanted`) replaces every rule but that a port be active.

    Raises UsageError if the user names an adapter that does not exist or is not active.
    """
    excluded: list[tuple[str, str]] = []

    def keep(candidates: list[Hca], rule: str, good: Callable[[Hca], bool]) -> list[Hca]:
        excluded.extend((label(hca, hcas), rule) for hca in candidates if not good(hca))
        return [hca for hca in candidates if good(hca)]

    left = keep(list(hcas), _INACTIVE, lambda hca: hca.active)
    left = _as_wanted(left, hcas, wanted, keep) if wanted is not None else _by_rules(left, gpus, default_route, keep)
    kind = _kind(left)
    order = sorted(left, key=lambda hca: (_nearest_gpu(hca, gpus)[1], natural(hca.name), hca.port))
    return RailChoice(kind, tuple(order), tuple(excluded))


def label(hca: Hca, hcas: Sequence[Hca]) -> str:
    """The adapter's name, with the port if it has several."""
    ports = sum(other.name == hca.name for other in hcas)
    return f"{hca.name}:{hca.port}" if ports > 1 else hca.name


Keep = Callable[[list[Hca], str, Callable[[Hca], bool]], list[Hca]]


def _as_wanted(left: list[Hca], hcas: Sequence[Hca], wanted: str, keep: Keep) -> list[Hca]:
    names = [name.strip() for name in wanted.lstrip("^=").split(",") if name.strip()]
    if wanted == "none":
        names = []
    known = {hca.name for hca in left} | {f"{hca.name}:{hca.port}" for hca in left}
    if missing := [name for name in names if name not in known]:
        there = ", ".join(dict.fromkeys(label(hca, hcas) for hca in left)) or "none"
        raise UsageError(f"{HCAS} names {missing[0]}, which is not an active adapter of this host", f"active: {there}")
    named = [hca for hca in left if hca.name in names or f"{hca.name}:{hca.port}" in names]
    take_named = not wanted.startswith("^")
    return keep(left, f"{HCAS}={wanted}", lambda hca: (hca in named) == take_named)


def _by_rules(left: list[Hca], gpus: Sequence[Gpu], default_route: str | None, keep: Keep) -> list[Hca]:
    """Adapters that pass the rules. Nearness to a GPU comes first: a virtual function beside one is a rail of a pod."""
    if any(hca.link_layer == "efa" for hca in left):
        return keep(left, "EFA carries the traffic here", lambda hca: hca.link_layer == "efa")
    if any(_is_ethernet(hca) and hca.is_here for hca in left):
        left = keep(
            left,
            "its network interface is not in this container, and those of others are",
            lambda hca: hca.is_here or not _is_ethernet(hca),
        )
    functions = [hca for hca in left if hca.virtual and _is_ethernet(hca)]
    rails = [hca for hca in functions if _beside_a_gpu(hca, gpus)]
    free = [hca for hca in functions if not hca.is_part and hca.netdev != default_route]
    if not rails and len(free) >= len(gpus) > 1:  # a virtual machine may hide which GPU an adapter is beside
        rails = free
    left = keep(
        left,
        "an Ethernet virtual function beside no GPU: it carries the cloud's own network",
        lambda hca: hca in rails or hca not in functions,
    )
    beside = [hca for hca in left if _beside_a_gpu(hca, gpus)]
    if any(not _is_ethernet(hca) for hca in left):
        if gpus and len(beside) >= len(gpus) and all(map(_is_ethernet, beside)):
            left = keep(left, "InfiniBand beside no GPU, and Ethernet is beside them: storage", _is_ethernet)
        else:
            left = keep(
                left,
                "Ethernet, and there is InfiniBand: storage or management",
                lambda hca: not _is_ethernet(hca),
            )
    if any(_beside_a_gpu(hca, gpus) for hca in left):
        left = keep(
            left,
            "shares no PCIe switch with a GPU, and others do: storage or management",
            lambda hca: _beside_a_gpu(hca, gpus),
        )
    if any(not hca.virtual for hca in left):
        left = keep(left, "a virtual function, and there are physical adapters", lambda hca: not hca.virtual)
    if any(hca.netdev != default_route for hca in left):
        left = keep(
            left,
            "carries the default route: management",
            lambda hca: not _is_ethernet(hca) or hca.netdev is None or hca.netdev != default_route,
        )
    fastest = max((hca.rate for hca in left), default=0.0)
    return keep(
        left, f"half the rate of the others ({fastest:g} Gbit/s) or less", lambda hca: hca.rate > _SLOW * fastest
    )


def _is_ethernet(hca: Hca) -> bool:
    return hca.link_layer != "infiniband"


def _kind(left: Sequence[Hca]) -> str:
    layers = {hca.link_layer for hca in left}
    if "efa" in layers:
        return "efa"
    if "infiniband" in layers:
        return "infiniband"
    return "roce" if layers else "ethernet"


def _distance(hca: Hca, gpu: Gpu) -> int:
    """Bridges between the two, or a large number if they share only the root complex or nothing."""
    common = 0
    for ours, theirs in zip(hca.pci_path, gpu.pci_path, strict=False):
        if ours != theirs:
            break
        common += 1
    if common >= 2:
        return len(hca.pci_path) + len(gpu.pci_path) - 2 * common
    if common == 1:
        return _SAME_ROOT
    return _ELSEWHERE


def _beside_a_gpu(hca: Hca, gpus: Sequence[Gpu]) -> bool:
    return any(_distance(hca, gpu) < _SAME_ROOT for gpu in gpus)


def _nearest_gpu(hca: Hca, gpus: Sequence[Gpu]) -> tuple[int, int]:
    """Distance and index of the nearest GPU, the first of several equally near ones."""
    return min(((_distance(hca, gpu), index) for index, gpu in enumerate(gpus)), default=(_ELSEWHERE, 0))
