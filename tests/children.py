"""Children of a test's process, which may be killed."""

import os
import sys
from collections.abc import Callable


def start_child(work: Callable[[], object]) -> int:
    """Start a child of this process that does this work; returns its process id."""
    child = os.fork()
    if child:
        return child
    try:
        work()
    except BaseException as error:
        print(repr(error), file=sys.stderr)
        os._exit(1)
    os._exit(0)


def exit_status(child: int) -> int:
    """Wait for the end of a child; below 0 if a signal ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
