"""Run a command line in this process."""

from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import BytesIO, TextIOWrapper

import pytest

from headwise.cli import main


@dataclass(frozen=True)
class Done:
    """The result of a command: its exit code and what it printed."""

    code: int
    out: str
    err: str


def headwise(*arguments: object, encoding: str = "utf-8") -> Done:
    """Run `headwise` with these arguments, as if in a pipe of this encoding."""
    out, err = (TextIOWrapper(BytesIO(), encoding, write_through=True) for _ in range(2))
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as exit_info:
        main([str(argument) for argument in arguments])
    printed = [stream.buffer.getvalue().decode(encoding) for stream in (out, err)]
    return Done(int(exit_info.value.code or 0), *printed)
