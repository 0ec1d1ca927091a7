"""Compiles kernels with Triton, nvcc and FlashInfer, as they do at run time. Runs in the image, without a GPU.

Its arguments are a folder to write to, and architectures like sm_90. Fails where a compiler does.
"""

import subprocess
import sys
from pathlib import Path

import triton
import triton.language as tl
from flashinfer.jit.page import gen_page_module
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from vllm.utils.flashinfer import has_flashinfer

PROGRAM = """
#include <cub/cub.cuh>
#include <cublas_v2.h>
#include <cuda.h>
#include <cuda_fp16.h>
#include <curand_kernel.h>
#include <nvrtc.h>
__global__ void twice(float *x) { x[threadIdx.x] *= 2; }
int main() { twice<<<1, 32>>>(nullptr); }
"""


@triton.jit
def twice(x, count: tl.constexpr):
    places = x + tl.arange(0, count)
    tl.store(places, tl.load(places) * 2)


folder, *architectures = Path(sys.argv[1]), *sys.argv[2:]
for name in architectures:
    source = ASTSource(twice, signature={"x": "*fp32", "count": "constexpr"}, constexprs={"count": 32})
    target = GPUTarget("cuda", int(name.removeprefix("sm_")), 32)
    assert triton.compile(source, target=target).asm["cubin"], f"Triton, for {name}"

(folder / "twice.cu").write_text(PROGRAM)
codes = [f"-gencode=arch=compute_{name.removeprefix('sm_')},code={name}" for name in architectures]
subprocess.run(["nvcc", *codes, "twice.cu", "-o", "twice", "-lcublas"], cwd=folder, check=True)

assert has_flashinfer(), "vLLM does without FlashInfer"
page = gen_page_module()
page.build(verbose=False)
assert page.get_library_path().is_file(), "FlashInfer"
