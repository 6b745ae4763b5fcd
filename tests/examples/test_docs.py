"""The code in README.md, docs/ and docstrings runs, and prints what stands below it.

A ```python block of a document is written as at the prompt (`>>>`), or plainly, with what it
prints in a ```text block right below it. A table with the columns `here` and `gives` has an
expression in each row, and its value. The code of a document shares its names.
"""

import ast
import doctest
import importlib
import inspect
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

import headwise
from house.source import PACKAGE, ROOT, Source, sources

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
BLOCK = re.compile(
    r"^```python\n(?P<code>.*?)^```\n(?:```text\n(?P<printed>.*?)^```$)?"
    r"|^\| [^\n]+ \| `(?P<line>[^`\n]+)` \| `(?P<gives>[^`\n]+)` \|$",
    re.MULTILINE | re.DOTALL,
)
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# A folder or file that code or a command writes, and does not replace.
WRITES = re.compile(
    r'\b(?:save|train)\(\w+, "([^"]+)"|\.export\("([^"]+)"|'
    r"(?<![\w-])(?:-o|--out|--save|--vllm-hook|--qrhead) ([a-z][\w./-]*)"
)
# Documents whose code takes more than a few seconds: tested in the long tier.
SLOW = {
    "README.md",
    "learn/bert.md",
    "learn/mini-gpt.md",
    "learn/tutorials.md",
    "learn/where-it-looks.md",
    "research/behaviors.md",
    "research/own-relations.md",
    "smaller.md",
    "watching-training.md",
    "research/roles.md",
    "shrink/encoder.md",
    "shrink/formats.md",
    "shrink/language-model.md",
}
WITH_EXAMPLES = [source for source in sources() if ">>>" in source.path.read_text("utf-8")]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _cases() -> Iterator[Any]:
    """The documents, the slow ones in the long tier."""
    for document in DOCUMENTS:
        name = str(document.relative_to(ROOT)).removeprefix("docs/")
        yield pytest.param(document, id=name, marks=[pytest.mark.full] if name in SLOW else [])


def test_slow_documents_exist() -> None:
    names = {str(document.relative_to(ROOT)).removeprefix("docs/") for document in DOCUMENTS}
    assert names >= SLOW


def test_each_lesson_leads_to_the_next() -> None:
    course = ROOT / "docs" / "learn" / "index.md"
    listed = re.findall(r"^\d+\. \[[^]]+\]\(([^)]+)", course.read_text("utf-8"), re.MULTILINE)
    lessons = [(course.parent / lesson).resolve() for lesson in listed]
    visited = lessons[:1]
    while link := re.search(
        r"^Next: \[[^]]+\]\(([^)]+)", visited[-1].read_text("utf-8"), re.MULTILINE
    ):
        visited.append((visited[-1].parent / link[1]).resolve())
    assert [page for page in visited if page in lessons] == lessons


@pytest.mark.parametrize("document", list(_cases()))
def test_the_code_of_a_document_runs(document: Path) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    for code, printed, where in _blocks(document):
        if ">>>" in code:
            names = _run(doctest.DocTestParser().get_doctest(code, names, where, where, 0))
            continue
        out = StringIO()
        with redirect_stdout(out):
            exec(compile(code, where, "exec"), names)
        same = doctest.OutputChecker().check_output(printed, out.getvalue(), FLAGS)
        assert same, f"{where} prints\n{out.getvalue()}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_calls_within_sentences_have_the_arguments_that_they_need(document: Path) -> None:
    """`hw.name(...)` must bind; an ellipsis, or a name without `hw.`, may leave arguments out."""
    sentences = re.sub(r"^```.*?^```$", "", document.read_text("utf-8"), flags=re.M | re.DOTALL)
    for code in re.findall(r"`([^`\n]+)`", sentences):
        try:
            nodes = list(ast.walk(ast.parse(code, mode="eval")))
        except SyntaxError:  # prose, a path or a command
            continue
        for call in (node for node in nodes if isinstance(node, ast.Call)):
            name = ast.unparse(call.func)
            function: Any = headwise
            for part in re.sub(r"^(hw|headwise)\.", "", name).split("."):
                function = getattr(function, part, None)
            if not callable(function):
                continue
            keywords = {keyword.arg or "": keyword.value for keyword in call.keywords}
            values = [*call.args, *keywords.values()]
            whole = name.startswith(("hw.", "headwise.")) and not any(map(_is_ellipsis, values))
            signature = inspect.signature(function)
            bind = signature.bind if whole else signature.bind_partial
            try:
                bind(*(arg for arg in call.args if not _is_ellipsis(arg)), **keywords)
            except TypeError as error:
                pytest.fail(f"`{code}`: {error}")
            folds = ast.unparse(keywords.get("fold", ast.Constant(None))) == "'mean'"
            assert not folds or "reference" in keywords, f"`{code}` needs reference="


def _is_ellipsis(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is ...


def test_the_readme_shows_code() -> None:
    assert list(_blocks(ROOT / "README.md"))


def test_documents_followed_in_one_folder_do_not_write_over_each_other() -> None:
    written: dict[str, set[str]] = {}
    for document in [*DOCUMENTS, *sorted((ROOT / "docs").rglob("*.ipynb"))]:
        text = document.read_text("utf-8")
        blocks = re.findall(r"^```.*?^```$", text, re.MULTILINE | re.DOTALL)
        code = "".join(blocks) or text.replace('\\"', '"')
        for names in WRITES.findall(code):
            written.setdefault("".join(names), set()).add(document.name)
    assert len(written) > 10
    # The same small model in both: the second page loads it.
    assert written.pop("first-look") == {"mini-gpt.md", "behaviors.md"}
    assert {name: files for name, files in written.items() if len(files) > 1} == {}


@pytest.mark.parametrize("source", WITH_EXAMPLES, ids=str)
def test_the_doctests_of_a_file_pass(source: Source) -> None:
    path = source.path.relative_to(PACKAGE.parent).with_suffix("")
    module = importlib.import_module(".".join(path.parts).removesuffix(".__init__"))
    tests = [test for test in doctest.DocTestFinder().find(module) if test.examples]
    assert tests, "its examples stand where nobody finds them"
    for test in tests:
        _run(test)


def _blocks(document: Path) -> Iterator[tuple[str, str, str]]:
    """The code of each block, its expected output, and its line."""
    text = document.read_text("utf-8")
    for block in BLOCK.finditer(text):
        where = f"{document.name}:{text.count(chr(10), 0, block.start()) + 1}"
        if block["code"]:
            yield block["code"], block["printed"] or "", where
        elif " | here | gives |\n" in text:
            yield f"print(({block['line']}))", block["gives"], where


def _run(test: doctest.DocTest) -> dict[str, Any]:
    """Run one test; return its names at the end."""
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    runner.run(test, out=said.append, clear_globs=False)
    assert not runner.failures, "".join(said)
    return test.globs
