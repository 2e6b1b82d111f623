"""Files in shared memory that have no name any more as soon as all who need them have mapped them.

While a file has a name, its maker holds a lock on it (flock), which ends with the process however that ends: a name
without a lock is what a killed process left, and ``remove_stale`` takes it away. No torch here; who tells the path to
whom is the caller's business (backends/shm.py has a collective that does).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from commbench.native import load
from commbench.units import format_size

if TYPE_CHECKING:
    from commbench.native import _shm

SHM_DIR = Path("/dev/shm")
DIR_VARIABLE = "COMMBENCH_SHM_DIR"
_NAME = re.compile(r"commbench-[0-9a-f]{32}")
_SETTLING_S = 2.0  # a maker locks its file right after it has made it


def directories() -> list[Path]:
    """Where segments may be made, best first: $COMMBENCH_SHM_DIR alone if set, else /dev/shm, then the temporary
    directory (a mapped file: as fast while it stays in the page cache, but it may be written back to a disk)."""
    chosen = os.environ.get(DIR_VARIABLE)
    if chosen:
        return [Path(chosen)]
    return [SHM_DIR, Path(tempfile.gettempdir())]


def make_file(directory: Path) -> tuple[int, Path]:
    """A new empty file, locked by this process as long as the descriptor (or a mapping of it) is open.

    The name has 128 random bits and the mode is 0600. The caller unlinks it. Raises OSError.
    """
    path = directory / f"commbench-{secrets.token_hex(16)}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with contextlib.suppress(OSError):  # a file system without locks: its files look stale to a cleaner of this user
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return fd, path


def create_file(size_bytes: int) -> tuple[int, Path]:
    """A new file of ``size_bytes`` zero bytes that are really reserved: (descriptor, path), as of ``make_file``.

    Raises OSError naming every directory that was tried and the bytes needed, when none has the room.
    """
    tried = []
    for directory in directories():
        try:
            fd, path = make_file(directory)
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


def stale(directory: Path) -> list[Path]:
    """Files of ours there that a process left which was killed while they had a name. Only this user's."""
    found = []
    try:
        entries = [entry for entry in directory.iterdir() if _NAME.fullmatch(entry.name)]
    except OSError:
        return []
    for path in entries:
        try:
            about = path.lstat()
            if about.st_uid != os.getuid() or time.time() - about.st_mtime < _SETTLING_S:
                continue
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:  # gone by now, or no plain file
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found.append(path)
        except OSError:
            pass  # its maker lives
        finally:
            os.close(fd)
    return sorted(found)


def remove_stale() -> list[Path]:
    """Remove what killed runs left in every directory for segments; gives what was removed."""
    removed = []
    for directory in directories():
        for path in stale(directory):
            unlink(path)
            removed.append(path)
    return removed


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
