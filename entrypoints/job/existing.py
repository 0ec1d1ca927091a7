"""Checks that the Ray cluster at RAY_ADDRESS exists."""

import asyncio
import contextlib
import sys
import tempfile

from entrypoints.environments.host_names import without_number
from entrypoints.environments.kubernetes.kuberay import ADDRESS, AUTO
from entrypoints.error_lines import cause
from entrypoints.errors import NoClusterError
from entrypoints.job.node import Node
from entrypoints.wire.network import cause_of, resolve

_PATIENCE = 5.0
"""Seconds in which something must listen at the address."""
_ANSWER = 15.0
"""Seconds in which it must answer as a Ray cluster. Importing Ray alone takes a second, more from a slow disk."""
_LOOK_AGAIN = 0.5
_CLIENT = "ray://"
"""The scheme of Ray's client server, which has a protocol of its own."""


async def require_cluster(node: Node, address: str) -> None:
    """Return if a Ray cluster answers at this address. Raises NoClusterError with the cause."""
    client, bare = address.startswith(_CLIENT), address.removeprefix(_CLIENT)
    if "://" in bare:
        return  # a scheme of an extension of Ray
    cause = "" if address == AUTO else await _silence(without_number(bare), int(bare.rpartition(":")[2]))
    if not cause and not client:
        cause = await _no_cluster(node, address)
    if cause:
        raise NoClusterError(
            f"{ADDRESS} is {address}, but no Ray cluster answers there: {cause}",
            f"unset {ADDRESS} to form a cluster of this job's nodes, or start that cluster first",
        )


async def _silence(host: str, port: int) -> str:
    """Why nothing listens there; empty if something does."""
    cause = "no answer"
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_PATIENCE):
            while True:
                try:
                    addresses = await resolve(host, port)
                except OSError as error:
                    cause = cause_of(error)
                else:
                    answers = await asyncio.gather(*(_connect(where, port) for where in addresses))
                    if None in answers:
                        return ""
                    cause = "; ".join(dict.fromkeys(text for text in answers if text))
                await asyncio.sleep(_LOOK_AGAIN)
    return cause


async def _connect(address: str, port: int) -> str | None:
    """None once a connection is made, else the cause."""
    try:
        async with asyncio.timeout(_PATIENCE / 2):
            _, writer = await asyncio.open_connection(address, port)
    except OSError as error:
        return cause_of(error)
    writer.close()
    return None


async def _no_cluster(node: Node, address: str) -> str:
    """Why what listens there is no Ray cluster; empty if it is one."""
    command = [sys.executable, "-P", "-m", "ray.scripts.scripts", "health-check", "--skip-version-check"]
    environment = {name: value for name, value in node.environment.items() if name != ADDRESS}
    with tempfile.TemporaryFile() as output:
        process = node.process_tree.spawn([*command, f"--address={address}"], environment, output=output)
        try:
            async with asyncio.timeout(_ANSWER):
                if await process.status() == 0:
                    return ""
        except TimeoutError:
            return f"what listens there does not answer as one within {_ANSWER:g} s"
        finally:
            await process.end(grace=0)
        output.seek(0)
        return cause(output.read().decode(errors="replace"), "what listens there is none")
