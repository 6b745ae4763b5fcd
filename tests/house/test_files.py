"""Whatever reads or writes a file of the package is tested with broken files, kills and full disks.

A function is found in the sources if it calls a reader or a writer, and is tested if it runs while
the loaders of `loaders`, or the writers and the verbs of the soak, do their work.
"""

import ast
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import CodeType, FrameType

import pytest

from errors.test_full_disk import STARTED, WRITERS
from house.source import PACKAGE, Source, sources
from loaders import KINDS
from soak.verbs import VERBS, write_often

READS = {
    "read_object", "read_json", "parse_json", "read_tensors", "read_arrays", "read_with_metadata",
    "safe_open", "load_file", "read_text", "read_bytes", "loads", "read_csv", "ParquetFile",
    "open_data",
}  # fmt: skip
WRITES = {"write_beside", "folder_beside", "files_beside", "write_json"}
# Functions of which no broken file is tested, and why.
PLAIN = "tests/laws/test_serving.py"
PACKAGED = "reads a file of the package"
FRESH = "reads what this process has just written, in a fresh process"
OWN_CODE = "runs a file of the user's own code; broken ones in tests/errors/test_cli_inputs.py"
JOBS = "tests/errors/test_corpus_jobs.py"
REFUSED = "reads a file that another reader has refused, to word the error"
READ_ELSEWHERE = {
    "cli/_roles.py: _relation": OWN_CODE,
    "cli/_inputs.py: _is_json": REFUSED,
    "jobs/_corpus.py: CorpusJob.run": JOBS,
    "jobs/_corpus.py: corpus": JOBS,
    "checkpoints/_fresh_process.py: _encode_sentences": FRESH,
    "checkpoints/_fresh_process.py: _open_with_transformers": FRESH,
    "checkpoints/_fresh_process.py: _write_outputs": FRESH,
    "checkpoints/_fresh_process.py: answer_in_fresh_process": FRESH,
    "checkpoints/_formats.py: _write_with_code": FRESH,
    "checkpoints/_gguf.py: _add_vocabulary": "reads what a tokenizer in memory says",
    "checkpoints/_per_layer.py: write_layers": FRESH,
    "report/comparison/_comparison.py: page_style": PACKAGED,
    "report/page/_render.py: _read": PACKAGED,
    "roles/_alignment_heads.py: _write_to_ctranslate2": "tests/laws/test_alignment.py",
    "vllm/_options.py: server_options": PLAIN,
    "vllm/_watch.py: ServedWatch.fetch": "reads what our own worker sends",
}
# Functions that meet no full disk, or are not killed, in these tests, and why.
ONE_FILE = "writes one file as others do"
COMMAND = {
    "cli/_options.py: check_output": "writes nothing: it tries whether a file can be written",
    "cli/_options.py: write_output": ONE_FILE,
    "cli/_prune.py: _write_curves": ONE_FILE,
    "roles/_alignment_heads.py: _write_to_ctranslate2": ONE_FILE,
    "roles/_task_heads.py: TaskHeads.export": ONE_FILE,
}
NO_FULL_DISK = COMMAND | {
    "jobs/_corpus.py: corpus": JOBS,
    "jobs/_corpus.py: CorpusJob.run": JOBS,
}


def functions_that_call(names: set[str]) -> set[str]:
    """The functions of the package that call one of these, nested ones by the outer one."""
    found = set()
    for source in sources():
        for name, function in _functions(source.tree.body, ""):
            called = {_name_of(node.func) for node in ast.walk(function) if _is_call(node)}
            if called & names and not source.module.startswith("headwise.files"):
                found.add(f"{source}: {name}")
    return found


def _functions(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, ast.stmt]]:
    for node in body:
        if isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node.body, f"{prefix}{node.name}.")


def _is_call(node: ast.AST) -> bool:
    return isinstance(node, ast.Call)


def _name_of(function: ast.expr) -> str:
    return getattr(function, "attr", getattr(function, "id", ""))


class Calls:
    """The functions of the package that ran in a block."""

    def __init__(self) -> None:
        self._codes: dict[int, CodeType] = {}

    def __enter__(self) -> "Calls":
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        # As little as possible, because this runs at each call of any function.
        self._codes[id(frame.f_code)] = frame.f_code

    def names(self) -> set[str]:
        """The files and names of the functions, nested ones by the outer one."""
        ours = [code for code in self._codes.values() if code.co_filename.startswith(str(PACKAGE))]
        return {
            f"{Source(Path(code.co_filename))}: {code.co_qualname.split('.<locals>')[0]}"
            for code in ours
        }


def check(names: set[str], calls: Calls, elsewhere: dict[str, str]) -> None:
    found = functions_that_call(names)
    assert len(found) > 10
    missing = found - calls.names() - set(elsewhere)
    assert not missing, "\n".join(sorted(missing))
    assert not set(elsewhere) - found  # what is no more


@pytest.mark.full
def test_every_function_that_reads_a_file_is_given_broken_ones(tmp_path: Path) -> None:
    calls = Calls()
    for number, loaders in enumerate(KINDS.values()):
        folder = tmp_path / str(number)
        folder.mkdir()
        for loader in loaders(folder).values():
            with calls:
                loader.read(loader.path)
    check(READS, calls, READ_ELSEWHERE)


@pytest.mark.full
def test_every_function_that_writes_a_file_meets_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_often(monkeypatch.setattr)
    works = [partial(write, tmp_path / name) for name, write in (WRITERS | STARTED).items()]
    check(WRITES, _calls_of(works), NO_FULL_DISK)


@pytest.mark.full
def test_every_function_that_writes_a_file_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_often(monkeypatch.setattr)
    works = []
    for name, verb in VERBS.items():
        (tmp_path / name).mkdir()
        works += [partial(work, tmp_path / name) for work in (verb.old, verb.work)]
    check(WRITES, _calls_of(works), COMMAND)


def _calls_of(works: list[Callable[[], object]]) -> Calls:
    calls = Calls()
    for work in works:
        with calls:
            work()
    return calls
