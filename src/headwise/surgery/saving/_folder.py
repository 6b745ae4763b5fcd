"""Writing a whole folder that leaves nothing half-written."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headwise.errors import OutputError


@contextmanager
def folder_beside(target: Path, force: bool) -> Iterator[Path]:
    """A folder to write into, which takes the place of `target` when the block ends well.

    Raises:
        OutputError: something other than an empty folder stands there and `force` is
            not given, or it cannot be written.
    """
    empty = target.is_dir() and not any(target.iterdir())
    if target.exists() and not empty and not force:
        raise OutputError(f"save: {target} exists. Choose another folder, or say force=True.")
    if target.exists() and not target.is_dir():
        raise OutputError(f"save: {target} is a file. Name a folder.")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
    except OSError as error:
        raise OutputError(
            f"save: {target} cannot be written ({error.strerror}). Choose another place."
        ) from error
    new, old = scratch / "new", scratch / "old"
    try:
        new.mkdir()
        yield new
        if target.exists():
            target.rename(old)
        try:
            new.rename(target)
        except BaseException:
            if old.exists():
                os.replace(old, target)
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
