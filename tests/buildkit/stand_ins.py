"""Stand-ins for vLLM's ROCm wheels, and an index on loopback that serves them.

Names, versions, tags, pins and needed libraries are facts of the real wheels, from public sources. The contents are
not: a module says its version and loads its libraries. Sources:

- vLLM 0.31.0, its index, and ROCm 7.2.3: the release notes of v0.31.0 (https://github.com/vllm-project/vllm/releases).
- The versions of torch, Triton and AITER: `docker/Dockerfile.rocm_base` of v0.31.0, which builds them at commits
  733fca1 and 669b31a and at v0.1.23; vllm/vllm-openai-rocm:v0.31.0 contains torch 2.13.0+git733fca1.
- The tags: the files of the indexes for 0.28.0 to 0.30.0, which ask for glibc 2.39; Triton's for 2.35, and amdsmi is
  pure Python. vLLM's installation page and `studio/backend/core/inference/engine_install.py` of unslothai/unsloth name
  2.39, too.
- The versions of flash-attn and amdsmi are those of 0.28.0 to 0.30.0, for the same ROCm.
- The libraries that torch needs outside its wheel (Open MPI 4's, libnuma's and ROCm's): the same file.

torchvision and torchaudio are left out: no public source names their versions in this release.
"""

import hashlib
import http.server
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

from packaging.utils import canonicalize_name

INDEX = "https://wheels.vllm.ai/rocm/0.31.0/rocm723"
PLATFORM = "cp312-cp312-manylinux_2_39_x86_64"
ROCM_LIBRARIES = (
    "libamdhip64.so.7",
    "libhiprtc.so.7",
    "libMIOpen.so.1",
    "librocblas.so.5",
    "libhipblas.so.3",
    "libhipblaslt.so.1",
    "libhipfft.so.0",
    "libhiprand.so.1",
    "libhipsparse.so.4",
    "libhipsparselt.so.0",
    "libhipsolver.so.1",
    "librocsolver.so.0",
    "librccl.so.1",
    "librocprofiler-sdk.so.1",
    "libroctx64.so.4",
)
SYSTEM_LIBRARIES = ("libmpi.so.40", "libmpi_cxx.so.40", "libnuma.so.1")
MODULE = """import ctypes
import pathlib

__version__ = {version!r}
for library in sorted(pathlib.Path(__file__).parent.rglob("*.so")):
    ctypes.CDLL(str(library))
"""


@dataclass(frozen=True)
class StandIn:
    """A wheel; `libraries` are paths of shared objects in it. Its module says `module_version`, or else its own."""

    name: str
    version: str
    tags: str
    requires: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    module_version: str = ""

    @property
    def filename(self) -> str:
        return f"{self.name}-{self.version}-{self.tags}.whl"


VLLM = "0.31.0+rocm723"
TORCH = "torch==2.13.0+git733fca1"
TRITON = "triton==3.8.0+git669b31ac"
WHEELS = (
    StandIn(
        "vllm",
        VLLM,
        PLATFORM,
        (
            TORCH,
            TRITON,
            "amd-aiter==0.1.23",
            "flash-attn==2.8.3",
            "amdsmi==26.2.2+c2d9476115",
            "transformers<5.18.0,>=5.10.4",
        ),
        ("vllm/_rocm_C.abi3.so",),
        module_version=VLLM.partition("+")[0],
    ),
    StandIn(
        "torch",
        "2.13.0+git733fca1",
        PLATFORM,
        (TRITON,),
        ("torch/lib/libc10_hip.so", "torch/lib/libtorch_hip.so"),
    ),
    StandIn("triton", "3.8.0+git669b31ac", "cp312-cp312-manylinux_2_35_x86_64"),
    StandIn("amd_aiter", "0.1.23", PLATFORM, (TORCH,)),
    StandIn("flash_attn", "2.8.3", PLATFORM, (TORCH,)),
    StandIn("amdsmi", "26.2.2+c2d9476115", "py3-none-any"),
)
VERSIONS = {canonicalize_name(wheel.name): wheel.version for wheel in WHEELS}


def write_wheels(folder: Path, library: bytes = b"") -> None:
    """Writes every wheel; `library` is the content of each shared object."""
    folder.mkdir(parents=True)
    for wheel in WHEELS:
        write_wheel(wheel, folder, library)


def write_wheel(wheel: StandIn, folder: Path, library: bytes = b"") -> None:
    info = f"{wheel.name}-{wheel.version}.dist-info"
    requires = "".join(f"Requires-Dist: {requirement}\n" for requirement in wheel.requires)
    metadata = f"Metadata-Version: 2.1\nName: {wheel.name}\nVersion: {wheel.version}\n{requires}"
    files = {
        f"{wheel.name}/__init__.py": MODULE.format(version=wheel.module_version or wheel.version).encode(),
        **dict.fromkeys(wheel.libraries, library),
        f"{info}/METADATA": metadata.encode(),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {wheel.tags}\n".encode(),
    }
    record = "".join(f"{path},,\n" for path in (*files, f"{info}/RECORD"))
    with zipfile.ZipFile(folder / wheel.filename, "w") as archive:
        for path, content in {**files, f"{info}/RECORD": record.encode()}.items():
            archive.writestr(zipfile.ZipInfo(path), content)


class Index(http.server.ThreadingHTTPServer):
    """A simple index below `/whl/`, with the wheels of a folder below `/files/`; other names get 404, as on S3.

    `asked` are the paths of all requests.
    """

    def __init__(
        self, folder: Path, host: str = "127.0.0.1", port: int = 0, handler: "type[IndexHandler] | None" = None
    ) -> None:
        super().__init__((host, port), handler or IndexHandler)
        self.folder = folder
        self.asked: list[str] = []

    @property
    def address(self) -> str:
        return f"http://{self.server_address[0]}:{self.server_port}/whl"

    def page(self, name: str) -> bytes:
        wheels = [path for path in sorted(self.folder.iterdir()) if canonicalize_name(path.name.split("-")[0]) == name]
        return "".join(map(link, wheels)).encode()


def link(wheel: Path) -> str:
    sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return f'<a href="/files/{quote(wheel.name)}#sha256={sha256}">{wheel.name}</a>'


class IndexHandler(http.server.BaseHTTPRequestHandler):
    server: Index

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        parts = [*unquote(self.path).split("/"), "", ""]
        kind, name = parts[1:3]
        file = self.server.folder / name
        if kind == "files" and file.is_file():
            self.answer_with(file.read_bytes())
        elif kind == "whl" and (page := self.server.page(name)):
            self.answer(200, page, {"Content-Type": "text/html"})
        else:
            self.answer(404)

    def do_HEAD(self) -> None:
        self.do_GET()

    def answer_with(self, content: bytes) -> None:
        """The whole file, or the range that was asked for (RFC 9110, section 14)."""
        asked = self.headers.get("Range", "").removeprefix("bytes=")
        if not asked:
            self.answer(200, content, {"Accept-Ranges": "bytes"})
            return
        first, _, last = asked.partition("-")
        start = int(first) if first else max(0, len(content) - int(last))
        end = min(int(last) + 1 if first and last else len(content), len(content))
        self.answer(206, content[start:end], {"Content-Range": f"bytes {start}-{end - 1}/{len(content)}"})

    def answer(self, status: int, content: bytes = b"", headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.send(content)

    def send(self, content: bytes) -> None:
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass
