"""Files in shared memory that have no name any more as soon as all who need them have mapped them.

No torch here; who tells the path to whom is the caller's business (backends/shm.py has a collective that does).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from commbench.native import load
from commbench.units import format_size

if TYPE_CHECKING:
    from commbench.native import _shm

SHM_DIR = Path("/dev/shm")
DIR_VARIABLE = "COMMBENCH_SHM_DIR"


def directories() -> list[Path]:
    """Where segments may be made, best first: $COMMBENCH_SHM_DIR alone if set, else /dev/shm, then the temporary
    directory (a mapped file: as fast while it stays in the page cache, but it may be written back to a disk)."""
    chosen = os.environ.get(DIR_VARIABLE)
    if chosen:
        return [Path(chosen)]
    return [SHM_DIR, Path(tempfile.gettempdir())]


def create_file(size_bytes: int) -> tuple[int, Path]:
    """A new file of ``size_bytes`` zero bytes that are really reserved: (descriptor, path).

    The name has 128 random bits and the mode is 0600. The caller unlinks it. Raises OSError naming every
    directory that was tried and the bytes needed, when none has the room.
    """
    tried = []
    for directory in directories():
        path = directory / f"commbench-{secrets.token_hex(16)}"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            tried.append(f"{directory}: {error.strerror}")
            continue
        try:
            # Reserves every page now: a full file system is an error here instead of a SIGBUS later.
            os.posix_fallocate(fd, 0, size_bytes)
        except OSError as error:
            os.close(fd)
            path.unlink(missing_ok=True)
            tried.append(f"{directory}: {error.strerror}")
            continue
        return fd, path
    size = f"{size_bytes} bytes ({format_size(size_bytes)})"
    raise OSError(f"no room for a shared segment of {size}: " + "; ".join(tried))


def open_file(path: Path, size_bytes: int) -> int:
    """The descriptor of a segment that another process made. Raises OSError, also when its size is not as told."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    found = os.fstat(fd).st_size
    if found != size_bytes:
        os.close(fd)
        raise OSError(f"{path} has {found} bytes, {size_bytes} were expected")
    return fd


def map_file(fd: int, size_bytes: int, *, keep_fd: bool = True) -> _shm.Segment:
    """Map a descriptor, which the segment owns from here on (also when mapping fails with OSError).

    keep_fd: hold it open, which the rank locks need; else it is closed at once.
    """
    segment: _shm.Segment = load().Segment(fd, size_bytes, keep_fd)
    return segment


def unlink(path: Path) -> None:
    """Remove the name; the memory lives on until nobody maps it."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
