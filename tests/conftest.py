"""Settings for all tests."""

import importlib.util
import signal

# A shell without job control starts background commands with Ctrl-C ignored, and what tests start inherits that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Examples take as long as a busy machine needs. The container tests also run without hypothesis.
if importlib.util.find_spec("hypothesis"):
    from hypothesis import settings

    settings.register_profile("untimed", deadline=None)
    settings.load_profile("untimed")
