"""Relations of one's own: by a function, by annotated pairs, and by a file at the command line."""

import json
import re
from pathlib import Path

import pytest

from command import headwise
from headwise.corpora import AnnotatedText, Pair, read_jsonl
from headwise.errors import ArgumentError, InputError
from headwise.lab import MiniGPT, MiniGPTConfig, save
from headwise.roles import Evidence, Pairs, TokenText, find_roles
from headwise.roles.relations import tokenize
from planted import TOKENIZER, Planted, clauses, lines

WITHOUT_NULLS = Evidence(())


def two_back(text: TokenText) -> Pairs:
    """Every token attends to the token two before it, if both are words."""
    words = [position for position, special in enumerate(text.special) if not special]
    return [(query, query - 2) for query in words if query - 2 in words]


def test_tokens_are_the_characters_of_each_token() -> None:
    (piece,) = tokenize(TOKENIZER, [AnnotatedText("w1 , w20 nothing")], 20).pieces
    assert piece.tokens == ("", "w1", ",", "w20", "nothing")
    assert len(piece.tokens) == len(piece.ids) == len(piece.special)


def test_pairs_of_a_file_are_the_relation_that_arcs_and_a_function_give(tmp_path: Path) -> None:
    texts = clauses(12)
    rows = [
        {
            "text": text.text,
            "words": text.words,
            "arcs": [(arc.dependent, arc.head, arc.relation) for arc in text.arcs],
            "pairs": [(arc.head, arc.dependent, "actor") for arc in text.arcs],
        }
        for text in texts
    ]
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), "utf-8")
    read = read_jsonl(path)
    assert [text.pairs[0] for text in read] == [
        Pair(text.arcs[0].head, text.arcs[0].dependent, "actor") for text in texts
    ]

    def actor(text: TokenText) -> Pairs:
        words = text.words  # one token each
        return [(words[pair.query][0], words[pair.key][0]) for pair in text.text.pairs]

    roles = find_roles(
        Planted([("agree", "even")], causal=True), TOKENIZER, read,
        relations={"by function": actor}, evidence=WITHOUT_NULLS,
    )  # fmt: skip
    effects = roles.frame().set_index(["role", "name"])["effect"]
    for head in ("L0.H0", "L0.H1"):
        assert effects["actor", head] == effects["head → nsubj", head]
    # The head finds its word; among tokens there are more candidates than among words.
    assert effects["actor", "L0.H0"] > 0.9
    assert effects["by function", "L0.H0"] == pytest.approx(effects["actor", "L0.H0"], abs=0.01)


@pytest.mark.parametrize("result", [[(1, 2, 3)], [("a", 1)], [1], None, [(0.5, 1)]])
def test_a_function_that_returns_no_pairs_is_named(result: object) -> None:
    with pytest.raises(ArgumentError, match=r"find_roles: 'mine' returns .* Return pairs"):
        find_roles(
            Planted([("any",)], causal=True), TOKENIZER, lines(4),
            relations={"mine": lambda text: result}, evidence=WITHOUT_NULLS,
        )  # fmt: skip


def test_a_pair_of_a_word_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"pair \(0, 2\) between 2 words"):
        AnnotatedText("Ann sang", ((0, 3), (4, 8)), pairs=(Pair(0, 2, "x"),))
    path = tmp_path / "texts.jsonl"
    path.write_text('{"text": "Ann sang", "words": [[0, 3], [4, 8]], "pairs": [[0, 1]]}', "utf-8")
    with pytest.raises(InputError, match=r"line 1: pairs hold '\[0, 1\]'\. Give \[number, number"):
        read_jsonl(path)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own") / "model"
    config = MiniGPTConfig(len(TOKENIZER.get_vocab()), n_layers=1, n_heads=2, d_model=16)
    save(MiniGPT(config), TOKENIZER, folder)
    return folder


OWN = """
def two_back(text):
    words = [i for i, special in enumerate(text.special) if not special]
    return [(i, i - 2) for i in words if i - 2 in words]

number = 7
"""


def test_the_command_takes_a_function_of_a_file(model: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN, "utf-8")
    (tmp_path / "texts.txt").write_text("\n".join(lines(10)), "utf-8")
    done = headwise(
        "roles", model, "--text", tmp_path / "texts.txt", "--nulls", "none",
        "--relation", f"{tmp_path / 'own.py'}:two_back", "-o", tmp_path / "roles.json",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert "two_back" in (tmp_path / "roles.json").read_text("utf-8")
    assert not list(tmp_path.glob("__pycache__"))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("own.py", "'.*own.py' is not FILE.py:NAME"),
        ("own.txt:two_back", "is not FILE.py:NAME"),
        ("own.py:not a name", "is not FILE.py:NAME"),
        ("absent.py:two_back", "absent.py is not a file"),
        (
            "own.py:three_back",
            r"has no function three_back. Did you mean two_back\? It has two_back",
        ),
        ("own.py:number", "has no function number. It has two_back"),
        ("broken.py:two_back", r"broken.py fails \(ZeroDivisionError: division by zero\)"),
        ("model/own.py:two_back", "lies in the folder of the model, whose code is never run"),
    ],
)
def test_a_relation_that_cannot_be_used_is_named(
    source: str, message: str, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(OWN, "utf-8")
    (tmp_path / "broken.py").write_text("1 / 0", "utf-8")
    (tmp_path / "texts.txt").write_text("\n".join(lines(10)), "utf-8")
    (tmp_path / "model").symlink_to(model)
    (model / "own.py").write_text("raise SystemExit", "utf-8")
    done = headwise(
        "roles", model, "--text", tmp_path / "texts.txt", "--relation", tmp_path / source
    )
    (model / "own.py").unlink()
    assert done.code == 2
    assert done.out == ""
    assert re.search(rf"^--relation: .*{message}", done.err), done.err
