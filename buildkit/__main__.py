"""`python -m buildkit` is the command `buildkit`."""

from buildkit.cli import main

main()
