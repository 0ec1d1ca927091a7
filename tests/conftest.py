"""What holds for all tests."""

import signal

# A shell without job control starts background commands with Ctrl-C ignored, and programs that tests start inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
