"""Bad input to `headwise importance` and to the reader of pairs: one clear line."""

from pathlib import Path

import pytest

from command import headwise
from headwise.corpora import read_pairs
from headwise.errors import InputError


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-o", "scores.csv"), "texts come from --text or"),
        (("--text", "a", "--pairs", "b", "-o", "scores.csv"), "texts come from --text or"),
        (("--text", "a", "-o", "scores.txt"), r"scores.txt does not end in .parquet"),
        (("--text", "a", "--json"), "a cannot be read"),
        (("--pairs", "a", "--json"), "a cannot be read"),
        (("--text", "a", "--json", "--method", "magic"), "'magic'"),
        (("--text", "a", "--json", "--loss", "magic"), "'magic'"),
    ],
)
def test_impossible_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = headwise("importance", "./model", *arguments)
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert message in done.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no pair"),
        ("\n\n", "holds no pair"),
        ("word\n", r"line 1 of .*pairs\.csv is not a pair \(1 column, not 3\)"),
        ("a,b,1\nc,d\n", r"line 2 of .*pairs\.csv is not a pair \(2 columns, not 3\)"),
        ("a,b,c\n", r"line 1 .*could not convert string to float: 'c'"),
        ("a,b,nan\n", "line 1 .*a similarity that is not a number"),
        ("a, ,2\n", "line 1 .*an empty sentence"),
        ('a,"b,2\n', "line 1 .*unexpected end of data"),
    ],
)
def test_a_file_that_holds_no_pairs(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "pairs.csv"
    path.write_text(text, "utf-8")
    with pytest.raises(InputError, match=message):
        read_pairs(path)


def test_pairs_keep_commas_and_line_breaks(tmp_path: Path) -> None:
    path = tmp_path / "pairs.csv"
    path.write_bytes('"a, b","c\nd",2.5\r\né,f,0\r\n'.encode())
    pairs = [(pair.one, pair.two, pair.similarity) for pair in read_pairs(path)]
    assert pairs == [("a, b", "c\nd", 2.5), ("é", "f", 0.0)]
