"""Atomic writes: a temporary file or folder beside the target, then renamed into place.

`os.link` and `os.rename` replace nothing: of two writers of one place, the later one is refused.
With `force`, `os.replace` replaces a file at once, and two renames replace a folder. A process that
is killed between those two leaves the old folder under another name, which the next `load` or
`save` says.
"""

import errno
import hashlib
import os
import platform
import re
import shlex
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from headwise.errors import ArgumentError, HeadwiseError, InputError, OutputError

# A folder that holds one of these is a model's or a study's.
MODEL_FILES = ("config.json", "headwise.json", "modules.json", "model.gguf")
STUDY_FILES = ("study.json",)

# A temporary name says which process writes it, so that what a killed one has left can be deleted.
# A process can only tell about those of its own host.
_HOST = hashlib.blake2b(platform.node().encode("utf-8", "replace"), digest_size=4).hexdigest()
PREFIX = f".headwise-{_HOST}-"
_NEW = "new"  # in a temporary folder: the new content
_OLD = ".headwise-old"  # the ending of a folder that is being replaced
_UNABLE = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM}
_TAKEN = {errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR}


def as_path(function: str, path: Any) -> Path:
    """The path that a function was given."""
    if not isinstance(path, str | os.PathLike):
        raise ArgumentError(
            f"{function}: a {type(path).__name__} is no path. Give one as a str or a pathlib.Path."
        )
    return Path(path)


@contextmanager
def write_beside(path: str | os.PathLike[str], force: bool = True) -> Iterator[Path]:
    """Yield the path of a new file beside `path`, which becomes `path` when the block succeeds.

    The block writes the file. If it raises, the file is deleted and `path` stays as it was. If the
    process is killed, `path` is the old file or the complete new one, and the next write into the
    same folder deletes the temporary file. The temporary name keeps the ending, because writers
    choose their format by it.

    Args:
        force: Whether an existing file is replaced.
    """
    target = Path(path)
    with _output_errors(target, "Choose a folder that exists and that you may write to."):
        if target.is_dir():
            raise OutputError(f"write: {target} is a folder. Name a file in it.")
        # In a folder of its own, because some writers make temporary files beside theirs.
        with _temporary_folder(target.parent) as folder:
            beside = folder / f"content{target.suffix}"
            with _named(target, folder), _named(target, beside):
                yield beside
            _give_default_modes(folder)
            _sync(beside)
            if force:
                beside.replace(target)
            else:
                _link(beside, target)
            _sync(target.parent)


def _link(beside: Path, target: Path) -> None:
    """Put a file where none is."""
    try:
        os.link(beside, target)
    except OSError as error:
        if error.errno in _UNABLE and not target.exists():  # a file system without links
            beside.rename(target)
            return
        if target.exists():
            raise OutputError(_taken("write", target, "--force")) from error
        raise


def _taken(function: str, target: Path, force: str) -> str:
    return (
        f"{function}: {target} exists: another process has written it in the meantime. Name "
        f"another place, or replace it with {force}."
    )


@contextmanager
def folder_beside(target: Path, force: bool, ours: Sequence[str] = ()) -> Iterator[Path]:
    """Yield a new folder beside `target` that becomes `target` when the block succeeds.

    If the block raises, the new folder is deleted and `target` stays as it was. If the process is
    killed, `target` is the old folder or the complete new one, and the next write beside it
    deletes the temporary folder; or the old folder has another name, as `check_not_moved` says.

    A folder that another process has written while the block ran is not replaced, either.

    Args:
        ours: As in `file_of_others`: a folder with files of others is not replaced.
    """
    with _output_errors(target, "Choose another place.", "save"):
        if moved := _moved(target):
            raise OutputError(f"save: {moved}")
        empty = target.is_dir() and not any(target.iterdir())
        if target.exists() and not empty and not force:
            raise OutputError(f"save: {target} exists. Choose another folder, or pass force=True.")
        if target.exists() and not target.is_dir():
            raise OutputError(f"save: {target} is a file. Name a folder.")
        if name := file_of_others(target, ours):
            raise OutputError(
                f"save: {target} holds {name}, which headwise did not write and would delete. "
                f"Choose another folder."
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        with _temporary_folder(target.parent) as new:
            with _named(target, new):
                yield new
            _give_default_modes(new)
            _sync_tree(new)
            if force and target.exists():
                _replace_folder(new, target)
            else:
                _rename_to_free_place(new, target)
            _sync(target.parent)


def _rename_to_free_place(new: Path, target: Path) -> None:
    with suppress(OSError):
        target.rmdir()  # an empty folder, which Windows would not replace
    try:
        new.rename(target)
    except OSError as error:
        if error.errno in _TAKEN or target.exists():
            raise OutputError(_taken("save", target, "force=True (--force)")) from error
        raise


def _replace_folder(new: Path, target: Path) -> None:
    """Replace a folder by two renames. No system call that Python knows exchanges two folders."""
    old = target.with_name(target.name + _OLD)
    shutil.rmtree(old, ignore_errors=True)  # `target` has replaced it already
    target.rename(old)
    try:
        new.rename(target)
    except BaseException:
        old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def check_not_moved(folder: str | os.PathLike[str], function: str) -> None:
    """Say where the content of a missing folder is, if a process was killed while replacing it."""
    if moved := _moved(Path(folder)):
        raise InputError(f"{function}: {moved}")


def _moved(target: Path) -> str:
    """What to do about a folder whose content has another name; empty if there is none."""
    with suppress(OSError, ValueError):
        old = target.with_name(target.name + _OLD)
        if old.is_dir() and not target.exists():
            line = f"mv {shlex.quote(str(old))} {shlex.quote(str(target))}"
            return (
                f"{target} is missing, since a process was killed while it replaced this folder; "
                f"its former content is {old}. Restore it: {line}"
            )
    return ""


def file_of_others(folder: Path, ours: Sequence[str]) -> str:
    """A name in a folder that holds none of `ours`; empty if it is missing, empty or ours.

    Args:
        ours: The names of which a folder holds one if it may be replaced; without names, any may.
    """
    names = sorted(os.listdir(folder)) if ours and folder.is_dir() else []
    return names[0] if names and not {*ours} & {*names} else ""


def check_writable(target: Path) -> None:
    """Refuse a file or folder that could not be written, before the work for it begins.

    A missing parent does not count, because `folder_beside` creates it.

    Raises:
        OutputError: its nearest existing parent is a file or cannot be written.
    """
    with _output_errors(target, "Choose another place."):
        path = target.absolute()
        first = next(p for p in (path, *path.parents) if p.parent.exists())
        with _temporary_folder(first.parent):
            pass


def make_folder(folder: str | os.PathLike[str], function: str) -> Path:
    """The folder, created with its parents if it does not exist.

    Raises:
        OutputError: it cannot be created.
    """
    target = as_path(function, folder)
    with _output_errors(target, "Choose another place.", function):
        target.mkdir(parents=True, exist_ok=True)
    return target


@contextmanager
def files_beside(folder: Path, last: str) -> Iterator[Path]:
    """Yield a new folder whose files replace those in `folder` when the block succeeds.

    Other files stay. The file `last` is removed first and written last, so that old and new files
    are never read together. If the process is killed in between, `folder` has no such file.

    Args:
        folder: A folder that exists.
        last: The file without which the others are not read.
    """
    with _output_errors(folder, "Choose another place.", "save"), _temporary_folder(folder) as new:
        with _named(folder, new):
            yield new
        _give_default_modes(new)
        _sync_tree(new)
        names = sorted(os.listdir(new), key=lambda name: (name == last, name))
        for name in names:
            if (folder / name).is_dir():
                raise OutputError(f"save: {folder / name} is a folder. Choose another place.")
        (folder / last).unlink(missing_ok=True)
        for name in names:
            (new / name).replace(folder / name)
            _sync(folder)


@contextmanager
def _temporary_folder(parent: Path) -> Iterator[Path]:
    """A new empty folder in `parent`, deleted after the block."""
    sweep(parent)
    folder = Path(tempfile.mkdtemp(dir=parent, prefix=f"{PREFIX}{os.getpid()}-"))
    try:
        (folder / _NEW).mkdir()
        yield folder / _NEW
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def sweep(folder: Path) -> None:
    """Delete the temporary folders in `folder` that a dead process of this host has left."""
    if sys.platform == "win32":
        return  # where asking whether a process lives would end it
    with suppress(OSError, ValueError), os.scandir(folder) as entries:
        for entry in entries:
            number = re.fullmatch(rf"{PREFIX}(\d+)-.*", entry.name)
            if number and entry.is_dir(follow_symlinks=False) and not _lives(int(number[1])):
                shutil.rmtree(entry.path, ignore_errors=True)


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # another user's
        pass
    return True


def _give_default_modes(new: Path) -> None:
    """Give files the mode of any new file.

    Some writers make a temporary file that only its owner may read. A file that more may read, or
    execute, stays so.
    """
    sample = new.with_name("mode")
    sample.touch()
    default = sample.stat().st_mode
    for path in new.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(stat.S_IMODE(path.stat().st_mode | default))


def _sync_tree(folder: Path) -> None:
    """Flush a folder and its content to disk, so that they survive a power loss."""
    for path in folder.rglob("*"):
        if not path.is_symlink():
            _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk."""
    is_folder = path.is_dir()
    if is_folder and sys.platform == "win32":  # which cannot open folders
        return
    # Windows flushes only files that are open for writing.
    handle = os.open(path, os.O_RDWR if sys.platform == "win32" else os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some file systems cannot flush a folder.
        if not (is_folder and error.errno in _UNABLE):
            raise
    finally:
        os.close(handle)


@contextmanager
def _named(target: Path, beside: Path) -> Iterator[None]:
    """Let errors of a block, which knows the temporary path alone, name the target."""
    try:
        yield
    except HeadwiseError as error:
        message = str(error).replace(str(beside), str(target))
        if message == str(error):
            raise
        raise type(error)(message) from error


@contextmanager
def _output_errors(target: Path, advice: str, function: str = "write") -> Iterator[None]:
    """Raise an OutputError with the path for any failure to write, such as a full disk."""
    try:
        _check_name(target)
        yield
    except HeadwiseError:  # an OutputError is an OSError too
        raise
    except OSError as error:
        reason = error.strerror or error
        raise OutputError(f"{function}: {target} cannot be written ({reason}). {advice}") from error


def _check_name(path: Path) -> None:
    """Refuse an invalid file name by an OSError before any work, not only at the final rename."""
    try:
        with suppress(FileNotFoundError):
            os.lstat(path)
    except ValueError as error:
        raise OSError(errno.EINVAL, str(error)) from error
