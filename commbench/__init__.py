"""commbench: measures, dispatches and judges collective communication.

Importing this package imports no torch; the parts that measure do.
"""

from __future__ import annotations

__version__ = "0.1.0"
