"""The page of a study: one HTML file with its style, its script and its numbers inside."""

import base64
import hashlib
from collections.abc import Mapping
from pathlib import Path

import jinja2
from markupsafe import Markup

from headwise._display import counted
from headwise.errors import ArgumentError
from headwise.files import write_beside
from headwise.report._payload import applying, as_json, payload
from headwise.report._roles import role_table
from headwise.report._study import Study
from headwise.report._visible_text import visible

_FOLDER = Path(__file__).parent / "page"
# In this order: a script uses what stands before it.
_SCRIPTS = ("dom", "study", "numbers", "grid", "heatmap", "head", "sample", "table")


def write_page(study: Study, path: Path) -> Path:
    """Write the page and give back its path."""
    if path.suffix.lower() != ".html":
        raise ArgumentError(f"report: {path} does not end in .html. Name the page like that.")
    page = render(study)
    with write_beside(path) as beside:
        beside.write_text(page, encoding="utf-8", newline="\n")
    return path


def render(study: Study) -> str:
    """The page as text. Whatever comes from the study is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style = (_FOLDER / "page.css").read_text(encoding="utf-8")
    script = _script()
    return environment.get_template("page.html").render(
        title=visible(study.title),
        summary=visible(_summary(study)),
        findings=[visible(line) for line in study.findings()],
        facts={
            "The model": _facts(study.model),
            "The texts": _facts(study.text),
            "Its training": _facts(study.training or {}),
        },
        heads=len(study.table.heads),
        roles=None if study.roles is None else role_table(study.roles),
        absent=[visible(n) for n in study.table.statistics if n not in applying(study)],
        versions=_facts(study.table.versions),
        policy=_policy(style, script),
        # Ours, or escaped already: the only things printed as they are.
        style=Markup(style),
        script=Markup(script),
        data=Markup(as_json(payload(study))),
    )


def _script() -> str:
    parts = [(_FOLDER / "script" / f"{name}.js").read_text(encoding="utf-8") for name in _SCRIPTS]
    return '"use strict";\n(() => {\n' + "\n".join(parts) + "})();\n"


def _policy(style: str, script: str) -> str:
    """Let this style and this script in, and nothing else: no network, no other code."""
    return (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; "
        f"base-uri 'none'; form-action 'none'"
    )


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _summary(study: Study) -> str:
    """What was watched, and on what, in a line."""
    table, text = study.table, study.text
    layers = len({(head.stack, head.layer) for head in table.heads})
    made = study.model.get("class", "a model")
    texts, tokens = text.get("texts", "some"), text.get("tokens", "?")
    read = f"{_counted(texts, 'text')} ({_counted(tokens, 'token')})"
    source = f" of {text['source']}" if "source" in text else ""
    heads = f"{counted(len(table.heads), 'head')} in {counted(layers, 'layer')}"
    return f"{heads} of {made}, on {read}{source}."


def _counted(number: str | int | float, noun: str) -> str:
    return counted(number, noun) if isinstance(number, int) else f"{_fact(number)} {noun}s"


def _facts(facts: Mapping[str, str | int | float]) -> dict[str, str]:
    return {visible(name): visible(_fact(value)) for name, value in facts.items()}


def _fact(value: str | int | float) -> str:
    if isinstance(value, bool | str):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
