"""Settings for all tests."""

import signal

# A shell without job control starts background commands with Ctrl-C ignored, and what tests start inherits that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
