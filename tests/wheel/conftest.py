"""The small project of the other tests of buildkit."""

from tests.buildkit.conftest import project

__all__ = ["project"]
