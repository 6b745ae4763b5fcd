"""Children of a test's process, which may be killed, and tests in a process of their own."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path


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


def run_laws(file: Path) -> None:
    """Run the tests of a file without the checks of shapes, which dynamo cannot trace."""
    options = ["-q", "-o", "addopts=--import-mode=importlib", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
