"""The size of /dev/shm: Ray's object store, and the buffers of NCCL and of the workers' queues."""

# Ray's own numbers (ray/_private/ray_constants.py): the object store's share of RAM, and its limit.
OBJECT_STORE_SHARE = 0.3
OBJECT_STORE_LIMIT = 200 * 10**9
SHM_SHARE = 0.8  # of /dev/shm, which `launch` gives to the object store
NCCL_SHM = 2**30  # bytes that NCCL and the workers' own queues ask for


def shm_size(ram_bytes: int, nodes: int = 1) -> int:
    """Bytes of /dev/shm for one of `nodes` that share a machine.

    Docker's default of 64 MB makes NCCL fail and Ray spill to disk. Memory is taken only when it is used.
    """
    store = min(OBJECT_STORE_SHARE * ram_bytes / nodes, OBJECT_STORE_LIMIT)
    return int(store / SHM_SHARE) + NCCL_SHM
