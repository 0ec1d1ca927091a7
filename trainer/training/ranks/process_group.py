"""The process group of one role."""

import logging
import os
import socket
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist

logger = logging.getLogger(__name__)


def open_store(address: str, world_size: int, timeout: float) -> dist.TCPStore:
    """Opens the store at rank 0, on a free port of this address alone: `store.port`.

    The store asks for no secret, and torch by itself lets it listen on all addresses of the node.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listening = socket.create_server((address, 0), family=family, backlog=world_size)
    return dist.TCPStore(
        address,
        listening.getsockname()[1],
        world_size,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout),
        master_listen_fd=listening.detach(),
    )


def connect_store(address: str, port: int, world_size: int, timeout: float) -> dist.TCPStore:
    """Connects another rank to the store of rank 0."""
    return dist.TCPStore(
        address, port, world_size, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout)
    )


def join(store: dist.TCPStore, rank: int, world_size: int, device: torch.device, address: str, timeout: float) -> None:
    """Creates the default process group. Its collectives wait at most `timeout` seconds for a dead peer.

    `address` is this node's address as its peers reach it.
    """
    name_interface(address)
    dist.init_process_group(
        # Checkpoints and token counts are reduced on the CPU, also where gradients are on GPUs.
        backend="gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout),
    )
    logger.info("rank %d of %d joined at %s", rank, world_size, address)


def name_interface(address: str) -> None:
    """Sets GLOO_SOCKET_IFNAME to the interface with this address, unless the user has set it.

    By default gloo takes the interface of the host name. Debian resolves that to 127.0.1.1, which other nodes cannot
    reach.
    """
    if "GLOO_SOCKET_IFNAME" not in os.environ and (interface := interface_of(address)):
        os.environ["GLOO_SOCKET_IFNAME"] = interface


def interface_of(address: str) -> str | None:
    """The network interface with this IP address, or None."""
    for interface, addresses in psutil.net_if_addrs().items():
        if any(entry.family in (socket.AF_INET, socket.AF_INET6) and entry.address == address for entry in addresses):
            return str(interface)
    return None
