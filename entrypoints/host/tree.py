"""The files below a root directory that describe a host: `/`, or a recorded tree."""

import os
from dataclasses import dataclass
from pathlib import Path

from entrypoints.errors import UsageError


@dataclass(frozen=True)
class Tree:
    """Reads `sys/…`, `proc/…` and `dev/…`. Drivers omit many files, so a missing or unreadable one is None or empty."""

    root: Path = Path("/")

    @classmethod
    def at(cls, root: Path) -> "Tree":
        """The tree at a directory that contains `sys`, or that is one. Raises UsageError."""
        if not root.is_dir():
            raise UsageError(f"{root} is not a directory", "give a directory that contains sys/, as `/` does")
        return cls(root)

    def path(self, name: str) -> Path:
        """The real path of `sys/…`, `proc/…` or `dev/…`."""
        first, _, rest = name.partition("/")
        if first == "sys" and not (self.root / "sys").is_dir():
            return self.root / rest
        return self.root / name

    def text(self, name: str) -> str | None:
        """A file's text without the final newline; None if it cannot be read, like an unset GID slot (EINVAL)."""
        try:
            return self.path(name).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return None

    def number(self, name: str) -> int | None:
        """A file's content as an integer; None if it is none."""
        text = self.text(name)
        return int(text) if text and text.lstrip("-").isdigit() else None

    def names(self, name: str) -> list[str]:
        """The names in a directory in natural order: `mlx5_2` before `mlx5_10`."""
        try:
            return sorted((entry.name for entry in self.path(name).iterdir()), key=natural)
        except OSError:
            return []

    def matching(self, pattern: str) -> list[Path]:
        """The paths that match a pattern like `dev/dri/renderD*`, sorted."""
        return sorted(self.root.glob(pattern))

    def exists(self, name: str) -> bool:
        """Whether the file or directory exists."""
        return self.path(name).exists()

    def pci_path(self, name: str) -> tuple[str, ...]:
        """The PCI bridges above a device and the device, from the root complex down; empty if the tree lacks them."""
        real = Path(os.path.realpath(self.path(name)))
        parts = real.parts
        roots = [index for index, part in enumerate(parts) if part.startswith("pci") and ":" in part]
        return parts[roots[0] :] if roots else ()


def natural(name: str) -> list[tuple[int, str]]:
    """A sort key that compares numbers by value."""
    pieces: list[tuple[int, str]] = []
    digits = ""
    for character in name + "\0":
        if character.isdigit():
            digits += character
            continue
        if digits:
            pieces.append((int(digits), ""))
            digits = ""
        pieces.append((-1, character))
    return pieces
