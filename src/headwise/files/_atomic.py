"""Atomic writes: a temporary file or folder beside the target, then renamed into place."""

import errno
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from headwise.errors import HeadwiseError, OutputError
from headwise.files._scratch import (
    PREFIX,
    give_default_modes,
    put_files_in_place,
    put_in_place,
    scratch_folder,
    sync,
)

# A folder that holds one of these is a model's or a study's.
MODEL_FILES = ("config.json", "headwise.json", "modules.json")
STUDY_FILES = ("study.json",)


@contextmanager
def write_beside(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield the path of a new file beside `path`, which replaces `path` when the block succeeds.

    The block writes the file. If it raises, the file is deleted and `path` stays as it was. If the
    process is killed, `path` is the old file or the complete new one, and the next write into the
    same folder deletes the temporary file. The temporary name keeps the ending, because writers
    choose their format by it.

    Raises:
        OutputError: the folder does not exist or cannot be written, the disk is full, or `path`
            is a folder.
    """
    target = Path(path)
    with _output_errors(target, "Choose a folder that exists and that you may write to."):
        if target.is_dir():
            raise OutputError(f"write: {target} is a folder. Name a file in it.")
        # In a folder of its own, because some writers make temporary files beside theirs.
        with scratch_folder(target) as folder:
            beside = folder / f"content{target.suffix}"
            yield beside
            give_default_modes(folder)
            sync(beside)
            beside.replace(target)
            sync(target.parent)


@contextmanager
def folder_beside(target: Path, force: bool, ours: Sequence[str] = ()) -> Iterator[Path]:
    """Yield a new folder beside `target` that replaces `target` when the block succeeds.

    If the block raises, the new folder is deleted and `target` stays as it was. If the process is
    killed, `target` is the old folder or the complete new one, and the next write beside it
    deletes the temporary folder.

    Args:
        ours: As in `file_of_others`: a folder with files of others is not replaced.
    Raises:
        OutputError: `target` is a file, a folder with content and `force` is False, or a folder
            with files of others, or it cannot be written.
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
        with scratch_folder(target) as new:
            yield new
            give_default_modes(new)
            put_in_place(new, target)


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
        with scratch_folder(first):
            pass


@contextmanager
def files_beside(folder: Path, last: str) -> Iterator[Path]:
    """Yield a new folder whose files replace those in `folder` when the block succeeds.

    All of them are replaced together: if the process is killed, `folder` holds all the old files
    or all the new ones. Other files stay. If a folder cannot be replaced as a whole, because it is
    the working folder, a mount point or holds folders, the file `last` is removed first and
    written last, so that old and new files are never read together.

    Args:
        folder: A folder that exists.
        last: The file without which the others are not read.
    Raises:
        OutputError: the folder cannot be written, or the disk is full.
    """
    with (
        _output_errors(folder, "Choose another place.", "save"),
        scratch_folder(folder / last) as new,
    ):
        yield new
        give_default_modes(new)
        for path in (folder / name for name in os.listdir(new)):
            if path.is_dir():
                raise OutputError(f"save: {path} is a folder. Choose another place.")
        put_files_in_place(new, folder, last)


@contextmanager
def _output_errors(target: Path, advice: str, function: str = "write") -> Iterator[None]:
    """Raise an OutputError with the path for any failure to write, such as a full disk."""
    try:
        _check_name(target)
        yield
    except HeadwiseError as error:
        # The block knows only the temporary path.
        temporary = re.escape(str(target.parent / PREFIX)) + r"[^/\\]*[/\\]new"
        message = re.sub(temporary, lambda _: str(target), str(error))
        if message != str(error):
            raise type(error)(message) from error
        raise
    except OSError as error:
        reason = error.strerror or error
        raise OutputError(f"{function}: {target} cannot be written ({reason}). {advice}") from error


def _check_name(path: Path) -> None:
    """Refuse an invalid file name before any work, not only at the final rename.

    Raises:
        OSError: the name is too long, holds a NUL or a lone surrogate, or a parent is a file.
    """
    try:
        with suppress(FileNotFoundError):
            os.lstat(path)
    except ValueError as error:
        raise OSError(errno.EINVAL, str(error)) from error
