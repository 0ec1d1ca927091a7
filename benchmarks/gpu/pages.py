"""Seconds that ranks take to allocate driver memory and to free it, alone and side by side, by page size.

    python3 -m benchmarks.gpu.pages [--gib 40] [--pages 20 64 128 256 512]

One process per GPU: first a single one, then all at once, each time with segments that expand by such pages; a page of
0 stands for fixed segments. Seconds are those of the slowest.
"""

import multiprocessing
import time
from multiprocessing.synchronize import Barrier

import torch

from benchmarks.gpu.common import Results, arguments


def take_and_give_back(gpu: int, page_mib: int, gib: int, together: Barrier) -> tuple[float, float]:
    """Seconds to allocate this much in tensors of 1 GiB, and to free it."""
    torch.cuda.set_device(gpu)
    torch.cuda.init()
    expanding = f"expandable_segments:True,large_segment_size_mb:{page_mib}"
    torch._C._accelerator_setAllocatorSettings(expanding if page_mib else "expandable_segments:False")
    together.wait()
    begin = time.perf_counter()
    tensors = [torch.empty(2**30, dtype=torch.uint8, device="cuda") for _ in range(gib)]
    torch.cuda.synchronize()
    taken = time.perf_counter() - begin
    tensors.clear()
    together.wait()
    begin = time.perf_counter()
    torch.cuda.empty_cache()
    return taken, time.perf_counter() - begin


def measure(gpus: int, page_mib: int, gib: int) -> tuple[float, float]:
    """The slowest rank's seconds to allocate and to free."""
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager, context.Pool(gpus) as pool:
        together = manager.Barrier(gpus)
        times = pool.starmap(take_and_give_back, [(gpu, page_mib, gib, together) for gpu in range(gpus)], chunksize=1)
    taken, given = zip(*times, strict=True)
    return max(taken), max(given)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--gib", type=int, default=40, help="of each GPU")
    parser.add_argument("--pages", type=int, nargs="+", default=[0, 20, 64, 128, 256, 512], help="MiB")
    options = parser.parse_args()
    results = Results(options.out, "pages")
    for gpus in sorted({1, torch.cuda.device_count()}):
        for page in options.pages:
            taken, given = measure(gpus, page, options.gib)
            results.add(gpus=gpus, gib=options.gib, page_mib=page, take=round(taken, 4), give_back=round(given, 4))


if __name__ == "__main__":
    main()
