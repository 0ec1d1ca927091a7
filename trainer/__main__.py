"""`python -m trainer`, which says in one message where packages come from that are not installed."""

import shlex
import sys

from trainer.packages import explained


def main() -> None:
    """Exits with the command's status."""
    try:
        from trainer.cli import run_process

        run_process()
    except ModuleNotFoundError as error:
        command = shlex.join(["python", "-m", "trainer", *sys.argv[1:]])
        missing = explained(error, command, command)
        sys.stderr.write(f"error: {missing}\n\nhint: {missing.hint}\n")
        sys.exit(missing.exit_code)


if __name__ == "__main__":
    main()
