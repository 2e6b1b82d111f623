"""The exceptions of commbench: one tree, each with the exit code that the command line gives it.

A message names the bad value, where it stands and the way out; foreign exceptions are mapped
to this tree at the seam where they enter, with ``raise … from``.
"""

from __future__ import annotations


class CommbenchError(Exception):
    """Root of the tree. ``exit_code`` is what a command exits with when this ends it."""

    exit_code = 1


class UsageError(CommbenchError):
    """Bad input: a flag, a file, a name or a value that cannot be used. Exit code 2."""

    exit_code = 2


class SpecError(UsageError):
    """A sweep specification (file or flags) that is malformed or describes nothing measurable."""


class UnknownName(UsageError):
    """A backend, policy, collective, dtype, op or shipped sweep that does not exist."""


class StoreError(UsageError):
    """A run directory that cannot be read or written as one."""


class PolicyError(UsageError):
    """A policy file that is malformed or contradicts itself."""


class BackendUnavailable(CommbenchError):
    """A backend cannot work here.

    ``reason`` says why, in words; ``remedy`` what the user can do about it ("" if nothing).
    """

    exit_code = 2

    def __init__(self, backend: str, reason: str, remedy: str = "") -> None:
        super().__init__(f"{backend} is unavailable: {reason}" + (f"; {remedy}" if remedy else ""))
        self.backend = backend
        self.reason = reason
        self.remedy = remedy


class CollectiveError(CommbenchError):
    """A collective was called wrongly (shape, dtype, rank) or failed in its backend."""


class PeerLost(CollectiveError):
    """Another rank died or stopped taking part; ``rank`` names it where it is known (else -1)."""

    def __init__(self, message: str, rank: int = -1) -> None:
        super().__init__(message)
        self.rank = rank


class LaunchError(CommbenchError):
    """A launch could not start or ended before its points were done."""


class EngineError(UsageError):
    """An engine that cannot do what was asked in its present state: closed, ended, busy, already profiling."""


class Interrupted(CommbenchError):
    """The user stopped the command; finished results are kept. Exit code 130."""

    exit_code = 130


def unknown(kind: str, value: str, known: object) -> UnknownName:
    """The error for a name that is not among ``known`` (any iterable of strings)."""
    names = ", ".join(sorted(str(k) for k in known))  # type: ignore[attr-defined]
    return UnknownName(f"unknown {kind} {value!r}; available: {names}")
