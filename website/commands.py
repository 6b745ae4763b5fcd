"""The reference of commands: the help text of each, as the terminal prints it."""

from typer.main import get_command
from typer.testing import CliRunner

from headwise.cli._app import app

COLUMNS = 84  # a line of code on the site at 1,280 px
HEAD = """# Commands

`headwise COMMAND --help` prints what stands here. `MODEL` is a folder, a GGUF file or a name on the
Hugging Face hub. Commands exit with 0, or with 2 and one line that says what is wrong.
"""


def commands_page() -> str:
    """The page: an index of all commands, and the help of each."""
    names = list(get_command(app).commands)
    links = " · ".join(f"[`{name}`](#headwise-{name})" for name in names)
    parts = [f"## headwise {name}\n\n```text\n{help_text(name)}\n```" for name in names]
    return "\n\n".join([HEAD, links, *parts]) + "\n"


def help_text(name: str) -> str:
    """What `headwise NAME --help` prints.

    Raises:
        RuntimeError: the command prints no help.
    """
    result = CliRunner().invoke(app, [name, "--help"], terminal_width=COLUMNS, prog_name="headwise")
    if result.exit_code or not result.output.strip():
        raise RuntimeError(f"headwise {name} --help exits with {result.exit_code}.")
    return result.output.strip()
