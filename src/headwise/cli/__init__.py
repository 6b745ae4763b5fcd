"""The command line: commands parse, call the library and print; they compute nothing."""

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from headwise._extras import require
from headwise.cli._print import print_error
from headwise.errors import HeadwiseError


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command line and exit: with 0 on success, with 2 and one line on an error.

    An interrupt exits with 130. Any other exception is a bug, and its traceback is shown.

    Args:
        arguments: The arguments after `headwise`. None takes those of the process.
    """
    _silence_libraries()
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        typer = require("typer", "cli", "headwise")
        require("rich", "cli", "headwise")
    except HeadwiseError as error:
        sys.exit(print_error(str(error)))
    from headwise.cli._app import app

    command = typer.main.get_command(app)
    try:
        # By itself typer would print an error on several lines, after the usage.
        code = command.main(arguments or ["--help"], "headwise", standalone_mode=False)
    except HeadwiseError as error:
        code = print_error(str(error))
    except typer.TyperException as error:  # a usage error
        message = error.format_message().rstrip(".").replace("?.", "?")
        end = "" if message.endswith("?") else "."
        context = getattr(error, "ctx", None)
        command_path = context.command_path if context else "headwise"
        code = print_error(f"{message}{end} Try {command_path} --help.")
    except OSError as error:  # such as a full disk
        code = print_error(f"{error.filename or 'headwise'}: {error.strerror or error}.")
    except (MemoryError, RuntimeError) as error:
        if not _is_about_memory(error):
            raise
        reason = (str(error).splitlines() or ["out of memory"])[0].rstrip(".")
        code = print_error(
            f"headwise: not enough memory ({reason}). Use smaller sizes or fewer texts."
        )
    if code == 130:
        print_error("Interrupted.")
    sys.exit(code)


def _is_about_memory(error: Exception) -> bool:
    """Whether memory ran out; torch says so only in the message of a RuntimeError."""
    message = str(error).lower()
    return isinstance(error, MemoryError) or any(
        phrase in message
        for phrase in ("out of memory", "can't allocate memory", "not enough memory")
    )


def _silence_libraries() -> None:
    """Turn off the messages and progress bars of other libraries."""
    for prefix in ("TRANSFORMERS", "HF_HUB"):
        os.environ.setdefault(f"{prefix}_VERBOSITY", "error")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
