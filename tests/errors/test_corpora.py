"""Each refusal of the corpora says what is wrong."""

import pytest

from headwise.corpora import Grammar, name_texts, read_texts
from headwise.errors import ArgumentError, InputError


def write(folder, data):
    path = folder / "texts.txt"
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("name", ["repeat_share", "adverb_share"])
@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan")])
def test_a_share_outside_0_to_1(name, share):
    with pytest.raises(ArgumentError, match=rf"{name} is {share}\. Give a share"):
        Grammar(**{name: share})


def test_a_missing_file(tmp_path):
    with pytest.raises(InputError, match=r"nowhere\.txt cannot be read \(No such file"):
        read_texts(tmp_path / "nowhere.txt")


@pytest.mark.parametrize("data", [b"", b" \n\t\r\n\n", b"\xef\xbb\xbf\n"])
def test_white_space_alone(tmp_path, data):
    with pytest.raises(InputError, match="holds no text"):
        read_texts(write(tmp_path, data))


def test_not_utf8_names_the_byte(tmp_path):
    with pytest.raises(InputError, match=r"not UTF-8 text \(byte 6 is 0xe9"):
        read_texts(write(tmp_path, "ok\nun été\n".encode("latin-1")[:10]))


@pytest.mark.parametrize(
    ("data", "lines", "paragraphs"),
    [
        (b"one\ntwo\n", ["one", "two"], ["one\ntwo"]),
        (b"\n\none\ntwo\n\n\n", ["one", "two"], ["one\ntwo"]),
        (b"one\ntwo\n\n \nthree", ["one", "two", "three"], ["one\ntwo", "three"]),
        (b"one\r\ntwo\r\n\r\nthree\r\n", ["one", "two", "three"], ["one\ntwo", "three"]),
        (b"\xef\xbb\xbfun caf\xc3\xa9", ["un café"], ["un café"]),
        ("a\u2028b\x0cc\nd".encode(), ["a\u2028b\x0cc", "d"], ["a\u2028b\x0cc\nd"]),
        (b"  indented\nno", ["  indented", "no"], ["  indented\nno"]),
    ],
)
def test_texts_are_lines_unless_paragraphs_are_asked_for(tmp_path, data, lines, paragraphs):
    assert read_texts(write(tmp_path, data)) == lines
    assert read_texts(write(tmp_path, data), paragraphs=True) == paragraphs


def test_one_name_cannot_compete():
    with pytest.raises(ArgumentError, match=r"name_texts: 1 different names\. Give two"):
        name_texts(3, names=["Ann", "Ann"])


@pytest.mark.parametrize(
    "pattern", ["none", "{one} {two} {again}", "{one} {two} {again} {other} {x}"]
)
def test_a_pattern_with_other_slots(pattern):
    with pytest.raises(ArgumentError, match=r"name_texts: the slots of .* are .*Give \{one\}"):
        name_texts(3, patterns=[pattern])
