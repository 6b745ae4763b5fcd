"""Atomic writes: a temporary file or folder beside the target, then moved into place.

`os.replace` replaces a file at once, and two renames replace a folder. A process that is killed
leaves the old content or the new one, and perhaps a temporary folder, `.headwise-…`; one that is
killed between the two renames leaves the old folder as `NAME.headwise-old`.
"""

import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from reprlib import repr as shortened
from typing import Any

from headwise._display import type_of
from headwise.errors import ArgumentError, HeadwiseError, OutputError

# A folder that holds one of these is a study's.
STUDY_FILES = ("study.json",)

_PREFIX = ".headwise-"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # errors of a disk with no room left
_NEW = "new"  # in a temporary folder: the new content
_OLD = ".headwise-old"  # the ending of a folder that is being replaced


def as_path(function: str, path: Any) -> Path:
    """The path that a function was given."""
    if not isinstance(path, str | os.PathLike):
        raise ArgumentError(
            f"{function}: {shortened(path)} is {type_of(path)}, not a path. Give a str or a "
            f"pathlib.Path."
        )
    return Path(path)


@contextmanager
def write_beside(path: str | os.PathLike[str], force: bool = True) -> Iterator[Path]:
    """Yield the path of a new file beside `path`, which becomes `path` when the block succeeds.

    The block writes the file. If it raises, the file is deleted and `path` stays as it was. If the
    process is killed, `path` is the old file or the complete new one. The temporary name keeps the
    ending, because writers choose their format by it.

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
            if not force and target.exists():
                raise OutputError(_taken("write", target, "--force"))
            beside.replace(target)


def _taken(function: str, target: Path, force: str) -> str:
    return (
        f"{function}: {target} exists: another process has written it in the meantime. Name "
        f"another place, or replace it with {force}."
    )


@contextmanager
def folder_beside(target: Path, force: bool, ours: Sequence[str] = ()) -> Iterator[Path]:
    """Yield a new folder beside `target` that becomes `target` when the block succeeds.

    If the block raises, the new folder is deleted and `target` stays as it was. If the process is
    killed, `target` is the old folder or the complete new one, or, between two renames, the old
    one has the ending `.headwise-old`.

    A folder that another process has written while the block ran is not replaced, either.

    Args:
        ours: As in `file_of_others`: a folder with files of others is not replaced.
    """
    with _output_errors(target, "Choose another place.", "save"):
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
            if force and target.exists():
                _replace_folder(new, target)
            else:
                with suppress(OSError):
                    target.rmdir()  # an empty folder, which Windows would not replace
                if target.exists():
                    raise OutputError(_taken("save", target, "force=True (--force)"))
                new.rename(target)


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
        names = sorted(os.listdir(new), key=lambda name: (name == last, name))
        for name in names:
            if (folder / name).is_dir():
                raise OutputError(f"save: {folder / name} is a folder. Choose another place.")
        (folder / last).unlink(missing_ok=True)
        for name in names:
            (new / name).replace(folder / name)


@contextmanager
def _temporary_folder(parent: Path) -> Iterator[Path]:
    """A new empty folder in `parent`, deleted after the block."""
    folder = Path(tempfile.mkdtemp(dir=parent, prefix=_PREFIX))
    try:
        (folder / _NEW).mkdir()
        yield folder / _NEW
    finally:
        shutil.rmtree(folder, ignore_errors=True)


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
        if error.errno in _FULL:
            advice = "Free some space there, or choose another place."
        raise OutputError(f"{function}: {target} cannot be written ({reason}). {advice}") from error


def _check_name(path: Path) -> None:
    """Refuse an invalid file name by an OSError before any work, not only at the final rename."""
    try:
        with suppress(FileNotFoundError):
            os.lstat(path)
    except ValueError as error:
        raise OSError(errno.EINVAL, str(error)) from error
