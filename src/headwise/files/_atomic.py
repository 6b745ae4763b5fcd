"""Writing that leaves nothing half-written: beside the target first, then renamed into place."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from headwise.errors import HeadwiseError, OutputError
from headwise.files._scratch import put_in_place, scratch_file, scratch_folder, sync


@contextmanager
def write_beside(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary file beside `path`; it takes the place of `path` when the block ends well.

    When the block raises, the temporary file goes and what stood at `path` stays as it was. When
    the process is killed, `path` is the old or the whole new file, and the temporary file goes at
    the next write into the same folder. The temporary name keeps the ending, since writers choose
    their format by it.

    Raises:
        OutputError: the folder does not exist or cannot be written, the disk is full, or `path`
            is a folder.
    """
    target = Path(path)
    with _output_errors(target, "Choose a folder that exists and that you may write to."):
        if target.is_dir():
            raise OutputError(f"write: {target} is a folder. Name a file in it.")
        with scratch_file(target.parent, target.suffix) as beside:
            yield beside
            # mkstemp makes files private; what we leave should be as readable as any new file.
            beside.chmod(0o666 & ~_umask())
            sync(beside)
            beside.replace(target)
            sync(target.parent)


@contextmanager
def folder_beside(target: Path, force: bool) -> Iterator[Path]:
    """Yield a new folder beside `target`; it takes the place of `target` when the block ends well.

    When the block raises, the new folder goes and what stood at `target` stays as it was. When
    the process is killed, `target` is the old or the whole new folder, and the temporary folder
    goes at the next write beside it.

    Raises:
        OutputError: something other than an empty folder stands there and `force` is not given,
            or it cannot be written.
    """
    with _output_errors(target, "Choose another place.", "save"):
        empty = target.is_dir() and not any(target.iterdir())
        if target.exists() and not empty and not force:
            raise OutputError(f"save: {target} exists. Choose another folder, or say force=True.")
        if target.exists() and not target.is_dir():
            raise OutputError(f"save: {target} is a file. Name a folder.")
        target.parent.mkdir(parents=True, exist_ok=True)
        with scratch_folder(target) as new:
            yield new
            put_in_place(new, target)


@contextmanager
def _output_errors(target: Path, advice: str, function: str = "write") -> Iterator[None]:
    """Say of any failure to write, such as a full disk, which file or folder it concerns."""
    try:
        _check_name(target)
        yield
    except HeadwiseError:
        raise
    except OSError as error:
        reason = error.strerror or error
        raise OutputError(f"{function}: {target} cannot be written ({reason}). {advice}") from error


def _check_name(path: Path) -> None:
    """Meet before any work what only the rename would meet: a name that no file can have.

    Raises:
        OSError: the name is too long, holds a NUL or half a character, or leads through a file.
    """
    try:
        with suppress(FileNotFoundError):
            os.lstat(path)
    except ValueError as error:
        raise OSError(errno.EINVAL, str(error)) from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
