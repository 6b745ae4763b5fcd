"""What every page is made of: a template that escapes, a security policy, and an atomic write."""

import base64
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headwise._extras import require
from headwise.errors import ArgumentError
from headwise.files import write_beside


def write_html(caller: str, page: str, path: Path) -> Path:
    """Write a page to a file whose name ends in .html.

    Raises:
        ArgumentError: the path does not end in .html.
        OutputError: the file cannot be written; no partial file is left behind.
    """
    if path.suffix.lower() != ".html":
        raise ArgumentError(f"{caller}: {path} does not end in .html. Choose a name that does.")
    with write_beside(path) as beside:
        beside.write_text(page, encoding="utf-8", newline="\n")
    return path


def fill_template(
    template: Path,
    content: Mapping[str, Any],
    *,
    style: str,
    script: str = "",
) -> str:
    """A template with its content, which is escaped, and our style and script, which are not."""
    jinja2 = require("jinja2", "report", "report")
    markup = require("markupsafe", "report", "report").Markup
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(template.parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template.name).render(
        **content, policy=_policy(style, script), style=markup(style), script=markup(script)
    )


def _policy(style: str, script: str) -> str:
    """A content security policy that allows this style and this script, and no network."""
    scripts = f"script-src '{_digest(script)}'; " if script else ""
    return (
        f"default-src 'none'; img-src data:; style-src '{_digest(style)}'; {scripts}"
        f"base-uri 'none'; form-action 'none'"
    )


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
