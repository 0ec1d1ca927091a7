"""Packages that may be missing where the trainer starts, and where each of them comes from."""

from trainer.errors import MissingPackageError

# What `slipway-rl[trainer]` installs, by the names of imports; the packages that only images hold.
ON_A_HOST = ("matplotlib", "numpy", "pyarrow", "pydantic", "rich", "typer", "urllib3", "yaml")
IN_IMAGES = ("aiohttp", "cloudpickle", "psutil", "ray", "safetensors", "tensorboard", "torch", "transformers", "vllm")


def explained(error: ModuleNotFoundError, caller: str, command: str) -> MissingPackageError:
    """The error that names the missing package of `caller`, with `command` in the image as the way out.

    Raises the error itself if the package is none of the trainer's.
    """
    package = (error.name or "").partition(".")[0]
    if package not in (*ON_A_HOST, *IN_IMAGES):
        raise error
    extra = "`pip install 'slipway-rl[trainer]'`, or " if package in ON_A_HOST else ""
    return MissingPackageError(
        f"{caller} needs the Python package {package}, which is not installed",
        hint=f'{extra}run it in the image: docker run --rm -v "$PWD:/workspace" slipway:cpu {command}',
    )
