"""Writing that leaves nothing half-written: beside the target first, then renamed into place."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headwise.errors import OutputError


@contextmanager
def write_beside(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary file beside `path`; it takes the place of `path` when the block ends well.

    When the block raises, the temporary file goes and what stood at `path` stays as it was.
    The temporary name keeps the ending, since writers choose their format by it.

    Raises:
        OutputError: the folder does not exist or cannot be written, or `path` is a folder.
    """
    target = Path(path)
    if target.is_dir():
        raise OutputError(f"write: {target} is a folder. Name a file in it.")
    try:
        handle, name = tempfile.mkstemp(
            dir=target.parent, prefix=f".{target.stem}-", suffix=target.suffix
        )
    except OSError as error:
        raise OutputError(
            f"write: {target} cannot be written ({error.strerror}). "
            f"Choose a folder that exists and that you may write to."
        ) from error
    os.close(handle)
    beside = Path(name)
    try:
        yield beside
        # mkstemp makes files private; what we leave should be as readable as any new file.
        beside.chmod(0o666 & ~_umask())
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
