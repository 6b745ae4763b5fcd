"""However a corpus is cut, its shards hold every text once, in order."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from corpus_files import write_jsonl, write_parquet
from headwise.corpora import read_conllu
from headwise.corpora.streams import open_source
from small_files import TREE

SHARDS = st.integers(1, 12)
# White space of all kinds, characters of one to four bytes, and marks of other formats.
CHARACTERS = st.sampled_from('ab \t\x0c\x85\u2028\u00a0\ufeffé日𝄞#\\"')
LINES = st.lists(st.text(CHARACTERS, max_size=9), max_size=12)
BREAKS = st.sampled_from(["\n", "\r\n"])


def all_texts(data: object, shards: int) -> list[str]:
    """The texts of all shards of one file, in the order of the file."""
    source = open_source(data)
    dealt = [list(source.texts(i, shards)) for i in range(shards)]
    return [dealt[n % shards][n // shards] for n in range(sum(map(len, dealt)))]


@given(lines=LINES, newline=BREAKS, shards=SHARDS, end=st.booleans())
def test_shards_of_a_text_file_are_its_texts(
    lines: list[str], newline: str, shards: int, end: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("corpus") / "a.txt"
    path.write_text(newline.join(lines) + newline * end, "utf-8", newline="")
    expected = path.read_bytes().decode("utf-8-sig").split("\n")
    expected = [line.rstrip() for line in expected]
    assert [t for t in all_texts(path, shards) if t] == [line for line in expected if line]


@given(texts=st.lists(st.text(max_size=20) | st.none(), max_size=20), shards=SHARDS, rows=SHARDS)
def test_shards_of_parquet_and_json_are_their_texts(
    texts: list[str | None], shards: int, rows: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("corpus")
    texts = [t if t is None else t.encode("utf-8", "ignore").decode() for t in texts]
    expected = [text or "" for text in texts]
    assert all_texts(write_parquet(folder / "a.parquet", texts, rows), shards) == expected
    assert all_texts(write_jsonl(folder / "a.jsonl", texts), shards) == expected


@pytest.mark.parametrize("shards", [1, 2, 3, 7, 50])
def test_shards_of_conllu_are_its_sentences(shards: int, tmp_path: Path) -> None:
    path = tmp_path / "a.conllu"
    path.write_text(f"# a comment alone\n\n{TREE}{TREE.replace('go', 'sing')}\n\n{TREE}", "utf-8")
    sentences = [text for text in all_texts(path, shards) if text]
    assert sentences == [sentence.text for sentence in read_conllu(path)]
    assert sentences[1] == "don't sing"


def test_other_keys_of_json_lines_may_hold_anything(tmp_path: Path) -> None:
    """Identifiers of 19 digits, broken emoji and repeated keys are common in corpora."""
    others = ["1234567890123456789", "9" * 5000, r'"\ud83d"', "NaN", "1e999", "{}", '"", "id": 2']
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"id": {other}, "text": "w1 w2"}}\n' for other in others))
    assert all_texts(path, 3) == ["w1 w2"] * len(others)


@pytest.mark.parametrize("kind", ["null", "string_view", "large_string", "dictionary"])
def test_texts_of_parquet_have_any_type_of_texts(kind: str, tmp_path: Path) -> None:
    """Writers give a column without any text the type null."""
    texts = pa.array(["a", None, "b", "a", "é"], pa.string())
    if kind == "null":
        texts = column = pa.nulls(5)
    else:
        column = texts.dictionary_encode() if kind == "dictionary" else texts.cast(kind)
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    assert all_texts(tmp_path / "a.parquet", 2) == [text or "" for text in texts.to_pylist()]


@pytest.mark.parametrize("name", ["a [1].txt", "日 本.txt"])
def test_a_file_is_named_literally_before_it_is_a_glob(name: str, tmp_path: Path) -> None:
    for each in (name, "1.txt"):
        (tmp_path / each).write_text(each)
    assert all_texts(tmp_path / name, 1) == [name]
