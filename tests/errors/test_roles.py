"""Each refusal when roles are evaluated says what is wrong."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from headwise.corpora import AnnotatedText
from headwise.errors import ArgumentError, HeadError, InputError, UnsupportedError
from headwise.roles import ChoiceRelation, Evidence, Pairs, Roles, TokenText, alignment, find_roles
from headwise.roles.relations import tokenize
from planted import TOKENIZER, Planted, lines

MODEL = Planted([("offset -1",)], causal=True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"models": 0}, r"models=0\. Give 1 or more"),
        ({"splits": 0}, r"splits=0\. Give 1 or more"),
        ({"seed": -1}, r"seed=-1\. Give 0 or more"),
        ({"nulls": ("permuted", "reversed")}, r"no null 'reversed'\. Choose from permuted"),
    ],
)
def test_evidence_that_cannot_be_had(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=f"Evidence: {message}"):
        Evidence(**given)


FAST = PreTrainedTokenizerFast(tokenizer_object=TOKENIZER)  # which cannot read an empty text


@pytest.mark.parametrize("tokenizer", [TOKENIZER, FAST])
@pytest.mark.parametrize("corpus", [[], ["", "  "]])
def test_a_corpus_without_tokens(corpus, tokenizer):
    distinct = len(corpus)
    with pytest.raises(InputError, match=rf"find_roles: {distinct} texts hold no token"):
        find_roles(MODEL, tokenizer, corpus)


def test_a_corpus_that_is_no_list_of_texts():
    with pytest.raises(ArgumentError, match=r"find_roles: corpus is 7, a int\. Give a str or A"):
        find_roles(MODEL, TOKENIZER, 7)
    with pytest.raises(ArgumentError, match=r"alignment: corpus\[1\] is 7, a int\. Give a str or"):
        alignment(MODEL, TOKENIZER, ["w1 w2", 7])


@pytest.mark.parametrize("name", ["self", "induction", "prefix matching"])
def test_a_custom_role_with_a_taken_name(name):
    with pytest.raises(ArgumentError, match=rf"find_roles: '{name}' is a role already"):
        find_roles(MODEL, TOKENIZER, lines(3), relations={name: lambda text: []})


def test_a_pair_outside_the_text():
    with pytest.raises(ArgumentError, match=r"'far' gives \(0, 99\) for a text of 2[0-9] tokens"):
        find_roles(MODEL, TOKENIZER, lines(3), relations={"far": lambda text: [(0, 99)]})


class Weightless(torch.nn.Module):
    config = MODEL.config

    def forward(self, input_ids, attention_mask):
        x = torch.nn.functional.one_hot(input_ids, 50).float()[:, None]
        return torch.nn.functional.scaled_dot_product_attention(x, x, x)


class Deaf(torch.nn.Module):
    def forward(self, input_ids, attention_mask):
        return input_ids


class Hasty(Planted):
    def forward(self, input_ids, attention_mask):
        return super().forward(input_ids[:, :-2], attention_mask[:, :-2])


class Both(Planted):
    def __init__(self):
        super().__init__([("offset -1",)], causal=True)
        self.config = SimpleNamespace(context=48, is_encoder_decoder=True)

    def forward(self, input_ids, attention_mask=None, decoder_input_ids=None):
        return super().forward(input_ids, attention_mask)


@pytest.mark.parametrize(
    ("model", "nulls", "message"),
    [
        (Weightless(), ("permuted",), "Weightless has no weight matrix to permute"),
        (MODEL, ("random",), "Planted has no known initialization .*Leave 'random' out"),
        (Deaf(), None, "no self-attention of Deaf was captured"),
        (Hasty([("first",)], causal=True), None, r"Hasty was given 3 texts of 2\d .* to 3 of"),
        (Both(), None, "find_roles: Both reads two texts, and .* encoder"),
    ],
)
def test_a_model_that_cannot_be_scored(model: Any, nulls: Any, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        find_roles(model, TOKENIZER, lines(3), evidence=Evidence(nulls))


def test_a_slow_tokenizer():
    class Slow:
        is_fast = False

    with pytest.raises(UnsupportedError, match=r"tokenize: Slow cannot say .*use_fast=True"):
        tokenize(Slow(), [AnnotatedText("a")], 8)


def test_a_word_longer_than_the_context():
    spelled = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    with pytest.raises(InputError, match=r"tokenize: 'aaaaaaaaaa' has more tokens .* \(8\)"):
        tokenize(spelled, [AnnotatedText("b aaaaaaaaaa")], 8)


@pytest.fixture(scope="module")
def roles():
    return find_roles(MODEL, TOKENIZER, lines(6), evidence=Evidence(nulls=()))


@pytest.mark.parametrize("ask", [Roles.why, Roles.examples, Roles.of])
def test_a_missing_head(roles, ask):
    with pytest.raises(HeadError, match=r"L7\.H0"):
        ask(roles, "L7.H0")


def test_a_file_that_holds_no_roles(roles, tmp_path):
    path = roles.save(tmp_path / "roles.json")
    said = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps({**said, "headwise_roles": 99}), "utf-8")
    with pytest.raises(InputError, match=r"Roles\.load: .* schema 99, not 2"):
        Roles.load(path)
    path.write_text(json.dumps({**said, "heads": [{"name": "L0.H0"}]}), "utf-8")
    with pytest.raises(InputError, match=r"Roles\.load: .* is incomplete or damaged"):
        Roles.load(path)


def test_texts_of_mostly_unknown_tokens():
    with pytest.raises(InputError, match=r"find_roles: 80% of the tokens .* are unknown to the"):
        find_roles(MODEL, TOKENIZER, ["una frase que nadie ,"])


def right(text: TokenText) -> Pairs:
    return ()


@pytest.mark.parametrize(("pairs", "candidates"), [(None, right), (right, [(1, 2)])])
def test_parts_of_a_choice_that_are_no_functions(pairs: Any, candidates: Any) -> None:
    with pytest.raises(ArgumentError, match=r"ChoiceRelation: (pairs|candidates) is .*Give a"):
        ChoiceRelation(pairs, candidates)
