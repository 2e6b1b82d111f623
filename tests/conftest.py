"""What holds for every test."""

from __future__ import annotations

import signal

from hypothesis import settings

# A shell that starts a job in the background lets it ignore Ctrl-C, and everything that the job starts inherits that.
# The tests that interrupt programs need what a terminal gives.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples every time: a test that fails once in a hundred runs tells nobody anything.
settings.register_profile("same", derandomize=True, deadline=None)
settings.load_profile("same")
