"""The front door: importing does nothing, and every public name is there and documented."""

import importlib
import inspect
import re
import subprocess
import sys

import pytest

import headwise
from house.source import PACKAGE

HEAVY = ("torch", "transformers", "tokenizers", "pandas", "pyarrow", "rich", "typer")
QUIET = f"""
import socket, sys

def refuse(*args, **kwargs):
    raise AssertionError("the network was asked for")

socket.socket.connect = socket.getaddrinfo = refuse
import headwise
heavy = [name for name in {HEAVY!r} if name in sys.modules]
assert not heavy, heavy
"""
# CPU seconds that a start may take, the interpreter's own left out.
IMPORT_SECONDS, HELP_SECONDS = 0.05, 0.3
TIMED_IMPORT = """
import time
start = time.process_time()
import headwise
print(time.process_time() - start)
"""
HELP = f"""
import contextlib, io, sys, time
start = time.process_time()
from headwise.cli import main
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()) as shown:
    main(["--help"])
assert "prune" in shown.getvalue()
heavy = [name for name in {(*HEAVY[:-2], "numpy", "rich.console")!r} if name in sys.modules]
assert not heavy, heavy
print(time.process_time() - start)
"""
FOLDERS = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))


def test_importing_does_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", QUIET], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("script", "most"),
    [(TIMED_IMPORT, IMPORT_SECONDS), (HELP, HELP_SECONDS)],
    ids=["import", "help"],
)
def test_starting_is_fast_and_imports_nothing_heavy(script: str, most: float) -> None:
    seconds = []
    for _ in range(3):  # the fastest: other programs and a cold disk slow down the rest
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        seconds.append(float(done.stdout))
    assert min(seconds) < most


def test_public_names_exist_and_are_documented_and_few() -> None:
    assert {*headwise.__all__} <= {*dir(headwise)}
    assert [n for n in headwise.__all__ if not (getattr(headwise, n).__doc__ or "").strip()] == []
    assert len(headwise.__all__) <= 53


def test_an_unknown_name_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        headwise.no_such_name  # noqa: B018


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_public_names_of_a_folder_are_documented(folder: str) -> None:
    source = (PACKAGE / folder / "__init__.py").read_text("utf-8")
    names = re.findall(r"^ *from \S+ import (\w+) as \1$", source, re.M)
    assert len(set(names)) == len(names)
    exported = {
        name: getattr(importlib.import_module(f"headwise.{folder}"), name) for name in names
    }
    for name, thing in exported.items():  # a constant has its comment where it is made
        documented = (thing.__doc__ or "").strip()
        assert documented or not (inspect.isclass(thing) or inspect.isroutine(thing)), name


def test_every_folder_and_file_has_a_docstring() -> None:
    files = [path for path in PACKAGE.rglob("*.py") if path.name != "__main__.py"]
    for path in files:
        assert path.read_text("utf-8").startswith('"""'), path


@pytest.mark.parametrize("folder", FOLDERS)
def test_functions_of_a_model_call_texts_and_tokenizer_the_same(folder: str) -> None:
    room = importlib.import_module(f"headwise.{folder}")
    for name, thing in vars(room).items():
        if inspect.isfunction(thing) and [*inspect.signature(thing).parameters][:1] == ["model"]:
            parameters = inspect.signature(thing).parameters
            assert not {"corpus", "behaviour", "behaviours"} & parameters.keys(), name
            if "tokenizer" in parameters:  # without one there may be batches alone
                assert parameters["tokenizer"].kind is inspect.Parameter.KEYWORD_ONLY, name
                assert "batches" not in parameters, name
