"""`python -m trainer`, which says in one message where packages come from that are not installed."""

import shlex
import sys

# What `slipway-rl[trainer]` installs, by the names of imports; the packages that only images hold.
ON_A_HOST = ("matplotlib", "numpy", "pyarrow", "pydantic", "rich", "typer", "urllib3", "yaml")
IN_IMAGES = ("aiohttp", "psutil", "ray", "safetensors", "tensorboard", "torch", "transformers", "vllm")


def main() -> None:
    """Exits with the command's status."""
    try:
        from trainer.cli import run_process

        run_process()
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in (*ON_A_HOST, *IN_IMAGES):
            raise
        words = ["python", "-m", "trainer", *sys.argv[1:]]
        image = f'docker run --rm -v "$PWD:/workspace" slipway:cpu {shlex.join(words)}'
        extra = "`pip install 'slipway-rl[trainer]'`, or " if package in ON_A_HOST else ""
        sys.stderr.write(
            f"error: {shlex.join(words)} needs the Python package {package}, which is not installed\n\n"
            f"hint: {extra}run it in the image: {image}\n"
        )
        sys.exit(2)


if __name__ == "__main__":
    main()
