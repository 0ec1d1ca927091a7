"""How the ranks of one role find each other."""

import logging
import os
import socket
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist

logger = logging.getLogger(__name__)


def open_store(address: str, world_size: int, timeout: float) -> dist.TCPStore:
    """The store of rank 0, on a port that the operating system picks; `store.port` says which."""
    return dist.TCPStore(
        address, 0, world_size, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout)
    )


def connect_store(address: str, port: int, world_size: int, timeout: float) -> dist.TCPStore:
    """The same store from another rank."""
    return dist.TCPStore(
        address, port, world_size, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout)
    )


def join(store: dist.TCPStore, rank: int, world_size: int, device: torch.device, address: str, timeout: float) -> None:
    """Makes the default process group. No collective in it waits longer than `timeout` seconds for a dead peer.

    `address` is this node's own, as its peers reach it.
    """
    name_interface(address)
    dist.init_process_group(
        # Checkpoints and token counts are on CPU even where the gradients are not.
        backend="gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout),
    )
    logger.info("rank %d of %d joined at %s", rank, world_size, address)


def name_interface(address: str) -> None:
    """Tells gloo which interface to use, unless the user did: it takes that of the host name, which Debian resolves to
    127.0.1.1, unreachable from another node."""
    if "GLOO_SOCKET_IFNAME" not in os.environ and (interface := interface_of(address)):
        os.environ["GLOO_SOCKET_IFNAME"] = interface


def interface_of(address: str) -> str | None:
    """The network interface that has this IP address; None if no interface has it."""
    for interface, addresses in psutil.net_if_addrs().items():
        if any(entry.family in (socket.AF_INET, socket.AF_INET6) and entry.address == address for entry in addresses):
            return str(interface)
    return None
