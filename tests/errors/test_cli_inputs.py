"""Inputs nobody thought of: each is a clear error, and no input is lost."""

import io
import sys
from pathlib import Path

import pytest

from command import headwise
from folders import write_llama

WORDS = ("<pad>", "<s>", "</s>", "I", "work", "you", "he", "works", "they")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("inputs")
    write_llama(place / "model", WORDS, hidden_size=12, num_attention_heads=6)
    (place / "t.txt").write_text("I work you work\nhe works\n", "utf-8")
    (place / "link.html").symlink_to(place / "t.txt")
    done = headwise("observe", place / "model", "--text", place / "t.txt", "-o", place / "tab.csv")
    assert done.code == 0, done.err
    return place


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "observe model --text tab.csv -o tab.csv --force",
            "--out tab.csv is the input --text tab",
        ),
        (
            "report model --text t.txt -o link.html --force",
            "--out link.html is the input --text t.",
        ),
        (
            "prune model --by tab.csv --remove 0.3 -o model --force",
            "model is the input MODEL model",
        ),
        ("report model --text t.txt --save model --force", "--save model is the input MODEL model"),
        ("observe model --text tab.csv", "tab.csv is a table or a plan that headwise saved, not"),
        ("prune model --by t.txt --remove 0.3 -o out", "t.txt does not end in .parquet, .csv, .js"),
        (
            "prune model --by model --remove 0.3 -o out",
            "table file: model is a folder. Give a file",
        ),
        ("prune model --by tab.csv --remove 0.3 -o out", "not the importance of heads (Scores)"),
        ("report model --text - --show -", "--text and --show both read standard input"),
        ("report --study model", "model/study.json holds no study"),
        (
            "report model --text t.txt --save t.txt",
            "output: --save t.txt is the input --text t.txt",
        ),
    ],
)
def test_an_input_of_the_wrong_kind_is_named(
    place: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, message: str
) -> None:
    monkeypatch.chdir(place)
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    done = headwise(*arguments.split())
    assert done.code == 2
    assert message in done.err
    assert {path: path.read_bytes() for path in place.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "standard input holds no text (0 bytes)"),
        (b"\xff\xfeI\0", "standard input is text in"),
    ],
)
def test_standard_input_is_called_by_its_name(
    place: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, message: str
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    done = headwise("observe", place / "model", "--text", "-")
    assert done.code == 2
    assert message in done.err


def test_texts_that_cache_makes_up_fit_the_model(place: Path) -> None:
    done = headwise("cache", place / "model", "--window", "8", "--max-texts", "2", "--json")
    assert done.code == 0, done.err  # its context of 40 tokens is shorter than 1,024
