"""Temporary folders that go with the command that made them, or with a later one of this machine where it was killed.

While a command has such a folder it holds a lock on it (flock), which ends with the process however that ends: a folder
that nobody holds is what a killed command left.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_NAME = re.compile(r"commbench-(calibrate|engine|node|rank|tune)-\w+")
_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextlib.contextmanager
def scratch_folder(what: str) -> Iterator[Path]:
    """A folder of mode 0700 in the temporary directory that is removed at the end, after those that killed commands
    left. what: calibrate, node, rank or tune, for its name. Raises OSError."""
    remove_stale_folders()
    path, fd = held_folder(what)
    try:
        yield path
    finally:
        try:
            shutil.rmtree(path)
        finally:
            os.close(fd)


def held_folder(what: str, parent: Path | None = None) -> tuple[Path, int]:
    """A new folder, and the descriptor that holds it while it is open. parent: instead of the temporary directory."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=f"commbench-{what}-", dir=parent))
        # another command may take it for stale before the lock is on it, and remove it
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(path, _FLAGS)
            try:
                with contextlib.suppress(OSError):  # a file system without locks: there nobody can hold a stale one
                    fcntl.flock(fd, fcntl.LOCK_EX)
                path.stat()
            except BaseException:
                os.close(fd)
                raise
            return path, fd


def remove_stale_folders() -> list[Path]:
    """Remove what killed commands of this user left in the temporary directory; gives what was removed."""
    removed = []
    for path in sorted(Path(tempfile.gettempdir()).glob("commbench-*-*")):
        if _NAME.fullmatch(path.name) is None:
            continue
        with contextlib.suppress(OSError):  # gone by now, no folder, another user's, or its maker lives
            fd = os.open(path, _FLAGS)
            try:
                if os.fstat(fd).st_uid != os.getuid():
                    continue
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path)
                removed.append(path)
            finally:
                os.close(fd)
    return removed
