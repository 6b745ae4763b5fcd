"""Claims: a process that works on something keeps others from doing the same work."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from headwise.errors import OutputError


@contextmanager
def claim(path: str | os.PathLike[str], wait: bool = False) -> Iterator[bool]:
    """Hold the lock file `path` while the block runs; it is deleted afterwards.

    The system releases the lock however the process ends, so a killed one leaves no claim.
    Where files cannot be locked (Windows, some network file systems), every process gets the
    claim: it saves work and is no protection, so results must be written atomically.

    Args:
        wait: Whether to wait until no other process has the claim.
    Yields:
        Whether this process has the claim; False while another process has it.
    Raises:
        OutputError: the lock file cannot be created.
    """
    handle, held = _open_locked(path, wait)
    try:
        yield held
    finally:
        if held:
            with suppress(OSError):
                Path(path).unlink(missing_ok=True)
        os.close(handle)


def _open_locked(path: str | os.PathLike[str], wait: bool) -> tuple[int, bool]:
    """The open file, and whether this process has locked it."""
    while True:
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise OutputError(
                f"claim: {path} cannot be written ({reason}). Choose a folder that exists and "
                f"that you may write to."
            ) from error
        held = lock(handle, wait) is not False
        # Another process may have deleted the file between its opening and the lock.
        if not held or os.fstat(handle).st_nlink:
            return handle, held
        os.close(handle)


def lock(handle: int, wait: bool) -> bool | None:
    """Lock an open file; False if another process holds the lock, None if there are no locks."""
    if sys.platform == "win32":
        return None
    import fcntl

    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:  # this file system has no locks
        return None
    return True
