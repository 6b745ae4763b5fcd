"""The page of a study: one HTML file with its style, its script and its numbers inside."""

import base64
import hashlib
from collections.abc import Mapping
from pathlib import Path

from headwise._display import counted
from headwise._packages import require
from headwise.errors import ArgumentError
from headwise.files import write_beside
from headwise.report._study_data import StudyData
from headwise.report.page._payload import applicable_statistics, as_json, payload
from headwise.report.page._role_table import role_table
from headwise.report.page._visible_text import visible

_FOLDER = Path(__file__).parent
# In this order: each script uses those before it.
_SCRIPTS = ("dom", "study", "numbers", "grid", "heatmap", "head", "sample", "table")


def write_page(study: StudyData, path: Path) -> Path:
    """Write the page and return its path."""
    if path.suffix.lower() != ".html":
        raise ArgumentError(f"report: {path} does not end in .html. Choose a name that does.")
    page = render(study)
    with write_beside(path) as beside:
        beside.write_text(page, encoding="utf-8", newline="\n")
    return path


def render(study: StudyData) -> str:
    """The page as text. Whatever comes from the study is escaped."""
    jinja2 = require("jinja2", "report", "report")
    markup = require("markupsafe", "report", "report").Markup
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style = (_FOLDER / "page.css").read_text(encoding="utf-8")
    script, applicable = _script(), applicable_statistics(study)
    return environment.get_template("page.html").render(
        title=visible(study.title),
        summary=visible(_summary(study)),
        findings=[visible(line) for line in study.findings()],
        facts={
            "Model": _facts(study.model),
            "Texts": _facts(study.text),
            "Training": _facts(study.training or {}),
        },
        heads=len(study.table.heads),
        roles=None if study.roles is None else role_table(study.roles),
        absent=[visible(name) for name in study.table.statistics if name not in applicable],
        versions=_facts(study.table.versions),
        policy=_policy(style, script),
        # Ours, or escaped already: nothing else is printed without escaping.
        style=markup(style),
        script=markup(script),
        data=markup(as_json(payload(study))),
    )


def _script() -> str:
    parts = [(_FOLDER / "script" / f"{name}.js").read_text(encoding="utf-8") for name in _SCRIPTS]
    return '"use strict";\n(() => {\n' + "\n".join(parts) + "})();\n"


def _policy(style: str, script: str) -> str:
    """A content security policy that allows this style and this script, and no network."""
    return (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; "
        f"base-uri 'none'; form-action 'none'"
    )


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _summary(study: StudyData) -> str:
    """The heads, the model and the texts of the study, in a line."""
    table, text = study.table, study.text
    layers = len({(head.stack, head.layer) for head in table.heads})
    model_class = study.model.get("class", "a model")
    texts, tokens = text.get("texts", "some"), text.get("tokens", "?")
    corpus = f"{_counted(texts, 'text')} ({_counted(tokens, 'token')})"
    source = f" of {text['source']}" if "source" in text else ""
    heads = f"{counted(len(table.heads), 'head')} in {counted(layers, 'layer')}"
    return f"{heads} of {model_class}, on {corpus}{source}."


def _counted(number: str | int | float, noun: str) -> str:
    return counted(number, noun) if isinstance(number, int) else f"{_fact(number)} {noun}s"


def _facts(facts: Mapping[str, str | int | float]) -> dict[str, str]:
    return {visible(name): visible(_fact(value)) for name, value in facts.items()}


def _fact(value: str | int | float) -> str:
    if isinstance(value, bool | str):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
