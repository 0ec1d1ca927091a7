"""`python -m entrypoints` is `launch`."""

import signal
import sys


def main() -> int:
    """Run `launch`. Returns its exit status; `errors` lists them."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends this process at once: no KeyboardInterrupt anywhere
    from entrypoints.cli import main as launch
    from entrypoints.streams import open_closed

    open_closed()
    return launch(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
