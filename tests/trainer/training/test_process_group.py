"""Where the store of a process group listens, and that ranks meet at it."""

import socket
from pathlib import Path

import pytest

from trainer.training.ranks.process_group import connect_store, open_store

TIMEOUT = 20.0


def addresses(port: int) -> set[str]:
    """The addresses of this host at which somebody listens on a port, as the kernel's tables write them."""
    tables = (Path("/proc/net", name).read_text().splitlines()[1:] for name in ("tcp", "tcp6"))
    rows = [line.split() for table in tables for line in table]
    return {row[1].split(":")[0] for row in rows if row[3] == "0A" and int(row[1].split(":")[1], 16) == port}


def is_own(address: str) -> bool:
    """Whether this host has the address."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


@pytest.mark.parametrize(
    ("address", "written"),
    [("127.0.0.1", "0100007F"), ("127.0.0.9", "0900007F"), ("::1", "00000000000000000000000001000000")],
)
def test_the_store_listens_on_the_nodes_address_alone(address: str, written: str) -> None:
    if not is_own(address):
        pytest.skip(f"this host has no {address}")
    store = open_store(address, 2, TIMEOUT)
    assert addresses(store.port) == {written}
    other = connect_store(address, store.port, 2, TIMEOUT)
    store.set("from rank 0", "here")
    assert other.get("from rank 0") == b"here"
