"""Scratch files and folders: locked while they are written, swept after a crash.

A scratch name begins with a prefix of ours and of this host. The process that writes holds a lock
on the file or folder. The system releases the lock when the process ends, however it ends, so
whatever has such a name and is unlocked was left behind by a dead process.
"""

import ctypes
import errno
import hashlib
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# Another host may not see our locks on a shared file system, so each sweeps only its own.
_HOST = hashlib.blake2b(platform.node().encode("utf-8", "replace"), digest_size=4).hexdigest()
PREFIX = f".headwise-{_HOST}-"
# In a scratch folder: the new content, the old one, and the name of the folder it belongs to.
_NEW, _OLD, _NAME = "new", "old", "name"
_AT_WORKING_FOLDER, _RENAME_EXCHANGE = -100, 2
_CANNOT = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM}


@contextmanager
def scratch_file(folder: Path, suffix: str) -> Iterator[Path]:
    """A new empty file in `folder`, locked inside the block and gone after it.

    What a dead process left in the same folder is swept first.
    """
    sweep(folder)
    while True:
        handle, name = tempfile.mkstemp(dir=folder, prefix=PREFIX, suffix=suffix)
        try:
            # A sweep may have taken the file between its creation and the lock.
            if _lock(handle, wait=True) and not os.fstat(handle).st_nlink:
                continue
            yield Path(name)
            return
        finally:
            # Before the lock is released: nobody else deletes a file of a living process.
            Path(name).unlink(missing_ok=True)
            os.close(handle)


@contextmanager
def scratch_folder(target: Path) -> Iterator[Path]:
    """A new empty folder beside `target`, locked inside the block and gone after it.

    What a dead process left beside `target` is swept first.
    """
    sweep(target.parent)
    while True:
        scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=PREFIX))
        handle = _open_folder(scratch)
        try:
            if handle is not None and _lock(handle, wait=True) and not scratch.exists():
                continue
            (scratch / _NAME).write_bytes(os.fsencode(target.name))
            (scratch / _NEW).mkdir()
            yield scratch / _NEW
            return
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
            if handle is not None:
                os.close(handle)


def put_in_place(new: Path, target: Path) -> None:
    """Let the folder that `scratch_folder` yielded take the place of `target`.

    Where the system can exchange two names in one step, `target` is the old or the new folder
    at every moment. Elsewhere there is a moment without either; if the process dies then, the
    next sweep puts the old folder back.
    """
    sync_tree(new)
    if not target.exists():
        new.rename(target)
    elif not exchange(new, target):
        old = new.with_name(_OLD)
        target.rename(old)
        try:
            new.rename(target)
        except BaseException:
            old.rename(target)
            raise
    sync(target.parent)


def sweep(folder: Path) -> None:
    """Delete the scratch files and folders in `folder` that a dead process left."""
    if sys.platform == "win32":
        return  # without such locks nobody can tell whether the process is dead
    with suppress(OSError, ValueError), os.scandir(folder) as entries:
        paths = [Path(entry.path) for entry in entries if entry.name.startswith(PREFIX)]
        for path in paths:
            # Another process may sweep the same folder.
            with suppress(OSError):
                _sweep_one(path)


def _sweep_one(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not _lock(handle, wait=False):
            return
        if not path.is_dir():
            path.unlink()
            return
        # Without its name the process died while it deleted the old folder, replaced long since.
        if (path / _OLD).exists() and (path / _NAME).exists():
            target = path.with_name(os.fsdecode((path / _NAME).read_bytes()))
            if not target.exists():
                (path / _OLD).rename(target)
        shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(handle)


def exchange(first: Path, second: Path) -> bool:
    """Swap two names in one step; False where the system or the file system cannot."""
    if not sys.platform.startswith("linux"):
        return False
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    folder = _AT_WORKING_FOLDER
    if rename(folder, os.fsencode(first), folder, os.fsencode(second), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _CANNOT:
        return False
    raise OSError(number, os.strerror(number), str(second))


def sync_tree(folder: Path) -> None:
    """Make sure that a folder and all that is in it outlives a loss of power."""
    for path in folder.rglob("*"):
        if not path.is_symlink():
            sync(path)
    sync(folder)


def sync(path: Path) -> None:
    """Make sure that a file, or the names in a folder, outlive a loss of power."""
    if path.is_dir():
        handle = _open_folder(path)
        if handle is None:
            return
    else:
        # Only Windows wants to be able to write what it makes last.
        handle = os.open(path, os.O_RDWR if sys.platform == "win32" else os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some file systems cannot do this to a folder.
        if not (path.is_dir() and error.errno in _CANNOT):
            raise
    finally:
        os.close(handle)


def _open_folder(path: Path) -> int | None:
    """A handle of a folder; None on Windows, which has none."""
    return None if sys.platform == "win32" else os.open(path, os.O_RDONLY | os.O_DIRECTORY)


def _lock(handle: int, wait: bool) -> bool:
    """Lock what is open here; False where another process holds it, or nothing can be locked."""
    if sys.platform == "win32":
        return False
    import fcntl

    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        return False
    return True
