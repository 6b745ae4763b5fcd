"""The progress bars of transformers, kept out of files and pipes."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar_in_terminals_only() -> Iterator[None]:
    """Show transformers' progress bar in a terminal, and not in a file or a pipe."""
    if sys.stderr.isatty() or "transformers" not in sys.modules:
        yield
        return
    from transformers.utils import logging

    if not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()
