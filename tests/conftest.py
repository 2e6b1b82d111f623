"""What holds for every test."""

from __future__ import annotations

import signal

# A shell that starts a job in the background lets it ignore Ctrl-C, and everything that the job starts inherits that.
# The tests that interrupt programs need what a terminal gives.
signal.signal(signal.SIGINT, signal.default_int_handler)
