"""The page of a study: one HTML file with its style, its script and its numbers inside."""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from headwise._display import counted
from headwise._extras import require
from headwise.errors import ArgumentError
from headwise.files import write_beside
from headwise.report._samples import Sample
from headwise.report._study_data import StudyData
from headwise.report.page._overview import overview
from headwise.report.page._payload import (
    MAX_BYTES,
    applicable_statistics,
    as_json,
    look_payload,
    payload,
)
from headwise.report.page._pictures import pruning
from headwise.report.page._role_table import role_table
from headwise.report.page._sections import compared, effects_section
from headwise.report.page._visible_text import digits, visible
from headwise.tables import statistic_label

_FOLDER = Path(__file__).parent
# In this order: each script uses those before it.
_TEXT_SCRIPTS = (
    *("core/dom", "core/study", "core/numbers", "core/grid", "text/attention", "core/heads"),
    *("heads/tabs", "text/words", "text/map", "text/pair", "text/thumbs"),
)
_HEAD_SCRIPTS = ("heads/overview", "heads/heatmap", "heads/panel", "heads/table")
# The lines ask for their width, which lays the page out: once, after the others have filled it.
_LAST_SCRIPTS = ("text/lines", "core/scroll", "heads/links")
_STYLES = ("base", "page", "pictures", "words", "images", "narrow")
# Rows of the table that is there without a script.
_STATIC_ROWS = 300


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


def render(study: StudyData, *, full: bool = False) -> str:
    """The page as text. Whatever comes from the study is escaped.

    Args:
        full: Whether nothing is left out to keep the page small.
    """
    applicable = applicable_statistics(study)
    content = {
        "title": visible(study.title),
        "summary": visible(_summary(study)),
        "overview": overview(study),
        "findings": [visible(line) for line in study.findings()],
        "facts": {
            "Model": facts(study.model),
            "Texts": facts(study.text),
            "Training": facts(study.training or {}),
        },
        "heads": len(study.table.heads),
        "table": _static_table(study, applicable),
        "roles": None if study.roles is None else role_table(study.roles),
        "effects": effects_section(study.effects),
        "pruning": pruning(study),
        "comparison": compared(study.comparison),
        "absent": [
            visible(statistic_label(name))
            for name in study.table.statistics
            if name not in applicable
        ],
        "versions": facts(study.table.versions),
    }
    scripts = (*_TEXT_SCRIPTS, *_HEAD_SCRIPTS, *_LAST_SCRIPTS)
    page = fill_page("page.html", content, scripts)
    data = payload(study, None if full else MAX_BYTES - len(page.encode()))
    return page.replace(DATA, as_json(data), 1)


def render_look(title: str, summary: str, sample: Sample, versions: Mapping[str, str]) -> str:
    """The page of one text as text, with maps alone."""
    content = {"title": visible(title), "summary": visible(summary), "versions": facts(versions)}
    page = fill_page("look.html", content, (*_TEXT_SCRIPTS, *_LAST_SCRIPTS))
    return page.replace(DATA, as_json(look_payload(sample, MAX_BYTES - len(page.encode()))), 1)


# Stands for the data in the templates, until the size of all else is known; no escaped text
# contains it.
DATA = "<<data>>"


def fill_page(name: str, content: Mapping[str, Any], scripts: Sequence[str]) -> str:
    """A template with its content, which is escaped, our style and scripts, which are not, and a
    mark in place of the data."""
    style = "".join(_read(f"style/{part}.css") for part in _STYLES)
    code = "\n".join(_read(f"script/{part}.js") for part in scripts)
    script = f'"use strict";\n(() => {{\n{code}}})();\n'
    jinja2 = require("jinja2", "report", "report")
    markup = require("markupsafe", "report", "report").Markup
    parts = {"policy": _policy(style, script), "style": markup(style), "script": markup(script)}
    page: str = _templates(jinja2).get_template(name).render(content, **parts)
    return page


@cache
def _templates(jinja2: ModuleType) -> Any:
    """Our templates, each of which is compiled once."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _policy(style: str, script: str) -> str:
    """A content security policy that allows this style and this script, and no network."""
    return (
        f"default-src 'none'; img-src data:; style-src '{_digest(style)}'; "
        f"script-src '{_digest(script)}'; base-uri 'none'; form-action 'none'"
    )


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _static_table(study: StudyData, statistics: Sequence[str]) -> dict[str, Any]:
    """The means of all heads as text, for readers without JavaScript."""
    heads = study.table.heads[:_STATIC_ROWS]
    columns = [study.table.mean(name) for name in statistics]
    return {
        "columns": [visible(statistic_label(name)) for name in statistics],
        "rows": [
            [str(head), *(digits(float(column[row])) for column in columns)]
            for row, head in enumerate(heads)
        ],
        "left_out": len(study.table.heads) - len(heads),
    }


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


def facts(facts: Mapping[str, str | int | float]) -> dict[str, str]:
    return {visible(name): visible(_fact(value)) for name, value in facts.items()}


def _fact(value: str | int | float) -> str:
    if isinstance(value, bool | str):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
