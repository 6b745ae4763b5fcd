"""Temporary files and folders: locked while they are written, swept after a crash.

A temporary name begins with a prefix of this library and this host. The writing process holds a
lock on the file or folder. The system releases the lock however the process ends, so an unlocked
file or folder of such a name was left behind by a dead process.
"""

import ctypes
import errno
import filecmp
import hashlib
import os
import platform
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# On a shared file system another host may not see our locks, so each host sweeps only its own.
_HOST = hashlib.blake2b(platform.node().encode("utf-8", "replace"), digest_size=4).hexdigest()
PREFIX = f".headwise-{_HOST}-"
# In a temporary folder: the new content, the old content, and the name of the target folder.
_NEW, _OLD, _NAME = "new", "old", "name"
_AT_WORKING_FOLDER, _RENAME_EXCHANGE = -100, 2
_CANNOT = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM}


@contextmanager
def scratch_folder(target: Path) -> Iterator[Path]:
    """A new empty folder beside `target`, locked inside the block and deleted after it.

    Folders left beside `target` by a dead process are swept first.
    """
    sweep(target.parent)
    scratch, handle = _new_locked_folder(target.parent)
    try:
        (scratch / _NAME).write_bytes(os.fsencode(target.name))
        (scratch / _NEW).mkdir()
        yield scratch / _NEW
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        if handle is not None:
            os.close(handle)


def _new_locked_folder(parent: Path) -> tuple[Path, int | None]:
    """A new temporary folder and the handle that locks it; None on Windows.

    Until it is locked, the sweep of another process may take it for one that a dead process left.
    """
    while True:
        scratch = Path(tempfile.mkdtemp(dir=parent, prefix=PREFIX))
        try:
            handle = _open_folder(scratch)
        except FileNotFoundError:
            if parent.exists():
                continue
            raise
        if handle is None:
            return scratch, None
        try:
            if not lock(handle, wait=True) or scratch.exists():
                return scratch, handle
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            os.close(handle)
            raise
        os.close(handle)


def give_default_modes(new: Path) -> None:
    """Give the files in the folder that `scratch_folder` yielded the mode of any new file.

    Some writers make a temporary file that only its owner may read. A file that more may read, or
    execute, stays so.
    """
    default = new.with_name(_NAME).stat().st_mode
    for path in new.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(stat.S_IMODE(path.stat().st_mode | default))


def put_in_place(new: Path, target: Path) -> None:
    """Replace `target` by the folder that `scratch_folder` yielded.

    If the system can exchange two names atomically, `target` is the old or the new folder at
    every moment. Elsewhere there is a moment without either; if the process dies then, the next
    sweep restores the old folder.
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


def put_files_in_place(new: Path, folder: Path, last: str) -> None:
    """Move the files of `new` into `folder`, all at the same moment if any replaces another."""
    names = sorted(os.listdir(new), key=lambda name: (name == last, name))
    if all(_is_same(new / name, folder / name) for name in names):
        return
    sync_tree(new)
    replaces = any((folder / name).exists() for name in names)
    if replaces and _replace_folder(new, folder, names):
        return
    (folder / last).unlink(missing_ok=True)
    for name in names:
        (new / name).replace(folder / name)
        sync(folder)


def _replace_folder(new: Path, folder: Path, names: list[str]) -> bool:
    """Replace a folder by one with the new files and its other files; False if it cannot be."""
    target = folder.resolve()
    working = Path.cwd()
    if target in (working, *working.parents):  # it would be left in a deleted folder
        return False
    with suppress(OSError), scratch_folder(target) as whole:
        shutil.copymode(target, whole)
        for name in names:
            os.link(new / name, whole / name)
        if not _link_others(target, whole):
            return False
        put_in_place(whole, target)
        # Files that another process wrote in the meantime, if `whole` is now the old folder.
        _link_others(whole, target)
        return True
    return False


def _link_others(source: Path, target: Path) -> bool:
    """Link the files that `target` lacks; False if there is a folder among them."""
    if not source.is_dir():
        return True
    others = {*os.listdir(source)} - {*os.listdir(target)}
    paths = [source / name for name in sorted(others) if not name.startswith(PREFIX)]
    if any(path.is_dir() and not path.is_symlink() for path in paths):
        return False
    for path in paths:
        os.link(path, target / path.name, follow_symlinks=False)
    return True


def _is_same(first: Path, second: Path) -> bool:
    return second.is_file() and filecmp.cmp(first, second, shallow=False)


def sweep(folder: Path) -> None:
    """Delete the temporary files and folders in `folder` that a dead process left."""
    if sys.platform == "win32":
        return  # without such locks a dead process cannot be recognised
    with suppress(OSError, ValueError), os.scandir(folder) as entries:
        paths = [Path(entry.path) for entry in entries if entry.name.startswith(PREFIX)]
        for path in paths:
            # Another process may sweep the same folder.
            with suppress(OSError):
                _sweep_one(path)


def _sweep_one(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not lock(handle, wait=False):
            return
        if not path.is_dir():
            path.unlink()
            return
        # Without the name, the process died while deleting the old folder, already replaced.
        if (path / _OLD).exists() and (path / _NAME).exists():
            target = path.with_name(os.fsdecode((path / _NAME).read_bytes()))
            if not target.exists():
                (path / _OLD).rename(target)
        shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(handle)


def exchange(first: Path, second: Path) -> bool:
    """Exchange two names atomically; False if the system or the file system cannot."""
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
    """Flush a folder and its content to disk, so that they survive a power loss."""
    for path in folder.rglob("*"):
        if not path.is_symlink():
            sync(path)
    sync(folder)


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk."""
    if path.is_dir():
        handle = _open_folder(path)
        if handle is None:
            return
    else:
        # Windows flushes only files that are open for writing.
        handle = os.open(path, os.O_RDWR if sys.platform == "win32" else os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some file systems cannot flush a folder.
        if not (path.is_dir() and error.errno in _CANNOT):
            raise
    finally:
        os.close(handle)


def _open_folder(path: Path) -> int | None:
    """A handle of a folder; None on Windows, which cannot open folders."""
    return None if sys.platform == "win32" else os.open(path, os.O_RDONLY | os.O_DIRECTORY)


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
