"""Every function that takes texts accepts the same lists of texts and refuses the rest."""

from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from tokenizers import Tokenizer
from torch import nn

import headwise as hw
from headwise.corpora import PAD, SPECIALS, AnnotatedText, Example, list_pairs
from headwise.errors import ArgumentError, HeadwiseError, InputError
from headwise.lab import MiniGPT, MiniGPTConfig, make_tokenizer, sample
from headwise.models import fingerprint
from headwise.models.texts import encode
from headwise.ownership import call_model
from headwise.recovery import recover
from headwise.report import compare, look, study
from headwise.roles import (
    Evidence,
    agreement,
    behavior,
    find_heads,
    find_roles,
    induction,
    translation,
)
from headwise.scoring import importance, prune_curves, read_batches
from headwise.surgery import costs, prune
from headwise.watch import Request, observe
from studies import make_roles, make_study
from tiers import crossed, diagonal, tiers

WORDS = ("she", "sang", "a", "long", "song", "and", "he", "liked", "it", "well", "while", "we")
WORDS += ("slept",)
TOKENIZER = CLEAN = make_tokenizer([*SPECIALS, *WORDS])
TEXT = "she sang a long song and he liked it well"
TEXTS = [TEXT, "we slept while she sang"]


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"d_model": 8, "n_layers": 1, "n_heads": 2, "context": 16}
    return MiniGPT(MiniGPTConfig(TOKENIZER.get_vocab_size(), **sizes)).eval()


def _study(model: nn.Module, texts: Any) -> Any:
    result = study(model, texts, tokenizer=TOKENIZER)
    counts = [result.table.count(name).tolist() for name in result.table.statistics]
    return result.text, counts, [sample.tokens for sample in result.samples]


def _roles(model: nn.Module, texts: Any) -> Any:
    evidence = Evidence(nulls=(), splits=1)
    roles = find_roles(
        model, texts, tokenizer=TOKENIZER, roles=["previous token"], evidence=evidence
    )
    return roles.notes, roles.rows["n"].tolist()


def _importance(model: nn.Module, texts: Any) -> Any:
    return importance(model, texts, tokenizer=TOKENIZER).per_text.tolist()


def _curves(model: nn.Module, texts: Any) -> Any:
    curves = prune_curves(model, texts, {"one": [[(0, 0)]]}, tokenizer=TOKENIZER)
    return curves.per_text["one"].tolist()


def _recover(model: nn.Module, texts: Any) -> Any:
    small = prune(model, [(0, 1)])
    return recover(small, model, texts, tokenizer=TOKENIZER, steps=1).tolist()


def _induction(model: nn.Module, texts: Any) -> Any:
    batches = induction(model, texts, tokenizer=TOKENIZER, sequences=3).batches
    return [batch.inputs["input_ids"].tolist() for batch in batches]


def _encode(model: nn.Module, texts: Any) -> Any:
    return encode(TOKENIZER, texts, model)


def _batches(model: nn.Module, texts: Any) -> Any:
    return [batch["input_ids"].tolist() for batch in read_batches(texts, model, TOKENIZER)]


Door = Callable[[nn.Module, Any], Any]
# `translation` needs annotations; its refusals are tested below.
DOORS: dict[str, Door] = {
    "study": _study,
    "find_roles": _roles,
    "importance": _importance,
    "prune_curves": _curves,
    "recover": _recover,
    "induction": _induction,
    "encode": _encode,
    "read_batches": _batches,
}
# These accept batches as well.
BATCHES = ("read_batches", "importance", "prune_curves", "recover")
REFUSING: dict[str, Door] = DOORS | {
    "translation": lambda model, texts: translation(model, texts, tokenizer=TOKENIZER),
    "list_pairs": lambda model, texts: list_pairs("list_pairs", texts, TEXTS),
}


def _look(model: nn.Module, texts: Any) -> Any:
    return vars(look(model, " ".join(texts), tokenizer=TOKENIZER).sample)


def _compare(model: nn.Module, texts: Any) -> Any:
    return compare(model, deepcopy(model), texts, tokenizer=TOKENIZER).frame().to_csv()


def _heads(model: nn.Module, texts: Any) -> Any:
    examples = [Example(TEXT, (0, 3), [(4, 8)], [(n, 15)], "song") for n in range(9, 13)]
    heads = find_heads(model, examples, tokenizer=TOKENIZER, evidence=Evidence(nulls=(), splits=1))
    return heads.frame().to_csv(), heads.texts, heads.answers


def _spans(model: nn.Module, texts: Any) -> Any:
    ids = [[*piece] for piece in encode(CLEAN, [TEXT], model)]
    with observe(model, Request(spans=("song",))) as watch:
        watch.spans([TEXT], TOKENIZER, song=[(16, 20)])
        model(torch.tensor(ids))
    return watch.table().frame().to_csv()


def _batches(model: nn.Module, texts: Any) -> Any:
    observer = hw.BatchObserver(model, tokenizer=TOKENIZER)
    return hw.HeadTable.sum([observer({"text": list(texts)})]).frame().to_csv()


READING: dict[str, Door] = DOORS | {
    "look": _look,
    "compare": _compare,
    "find_heads": _heads,
    "Watch.spans": _spans,
    "BatchObserver": _batches,
    "sample": lambda model, texts: sample(model, TEXT, tokenizer=TOKENIZER, max_new_tokens=3),
}  # fmt: skip


TOKENIZERS = ("tokenizers", "transformers")
OF_EITHER = [door for door in READING if door != "sample"]  # which is for a Mini-GPT's alone


@pytest.mark.parametrize(
    ("kind", "door"),
    tiers(
        [("tokenizers", "sample"), *diagonal(TOKENIZERS, OF_EITHER)], product(TOKENIZERS, OF_EITHER)
    ),
)
def test_truncation_and_padding_of_a_tokenizer_are_not_used_and_not_changed(
    model: nn.Module, door: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [f"{TEXT} while {TEXT}", *TEXTS]  # the first is longer than the context
    clean, own = (Tokenizer.from_str(CLEAN.to_str()) for _ in range(2))
    own.enable_truncation(4, direction="left")
    own.enable_padding(length=128, pad_token=PAD, pad_id=CLEAN.token_to_id(PAD))
    if kind == "transformers":
        clean, own = (
            transformers.PreTrainedTokenizerFast(tokenizer_object=x, pad_token=PAD)
            for x in (clean, own)
        )
        own.truncation_side = own.padding_side = "left"
    monkeypatch.setitem(globals(), "TOKENIZER", clean)
    expected = READING[door](model, texts)
    monkeypatch.setitem(globals(), "TOKENIZER", own)
    assert repr(READING[door](model, texts)) == repr(expected)
    if kind == "tokenizers":
        assert (own.truncation["max_length"], own.padding["length"]) == (4, 128)
    else:
        assert own.truncation_side == "left"


@pytest.mark.parametrize("door", DOORS)
def test_a_string_is_one_text(model: nn.Module, door: str) -> None:
    expected = DOORS[door](model, [TEXT])
    assert DOORS[door](model, TEXT) == expected
    if door == "find_roles":
        assert DOORS[door](model, AnnotatedText(TEXT)) == expected


ITERABLES: dict[str, Callable[[list[str]], Iterable[str]]] = {
    "tuple": tuple,
    "generator": iter,
    "array": np.array,
    "series": pd.Series,
    "with empty texts": lambda texts: [*texts, "", " \n"],
}


# All doors read texts by the same function: each of them, and each kind, at once.
@pytest.mark.parametrize(("door", "kind"), crossed(DOORS, ITERABLES))
def test_any_iterable_is_the_list_of_its_texts(model: nn.Module, door: str, kind: str) -> None:
    assert DOORS[door](model, ITERABLES[kind](TEXTS)) == DOORS[door](model, TEXTS)


@pytest.mark.parametrize("door", [*REFUSING, "look", "compare"])
def test_a_path_in_place_of_texts_is_refused_with_its_reader(
    model: nn.Module, door: str, tmp_path: Path
) -> None:
    call = (REFUSING | {"compare": _compare}).get(door)
    if call is None:
        call = lambda model, text: look(model, text, tokenizer=TOKENIZER)  # noqa: E731
    (tmp_path / "my sentences").write_text(TEXT, "utf-8")
    for path, reader in (
        ("texts.txt", r"headwise.corpora.read_texts\(path\)"),
        (str(tmp_path / "my sentences"), r"headwise.corpora.read_texts\(path\)"),
        (Path("some/corpus.conllu"), r"headwise.corpora.read_conllu\(path\)"),
        ("data.csv", r"pandas.read_csv\(path\)\[column\], or headwise.corpora.read_pairs"),
        (["a.jsonl", "b.jsonl"], r"headwise.corpora.read_jsonl\(path\)"),
    ):
        with pytest.raises(ArgumentError, match=rf"the path of a file\. Read it with {reader}"):
            call(model, path)
    assert list_pairs("list_pairs", ["see notes.txt", "a.txt"])[1][0] == "a.txt"


EMPTY = r"hold no token|0 given|2 targets|of pair 0 is empty"
# What is no list of texts, and how that is named; a function that takes batches names it as one.
WRONG: dict[str, tuple[Any, str]] = {
    "None in a list": ([TEXT, None], r"\[1\] is None, a NoneType"),
    "bytes in a list": ([TEXT, b"she sang"], r"\[1\] is b'she sang', a bytes"),
    "a list in a list": ([TEXT, [TEXT]], r"\[1\] is \['she sang.*a list"),
    "half of a pair": ([TEXT, "she \ud83d"], r"\[1\] holds '\\ud83d' at 4, half of a surrogate"),
    "a frame": (pd.DataFrame({"text": TEXTS}), "a DataFrame"),
    "no text": ([], EMPTY),
    "an empty text": ("", EMPTY),
    "white space": (["", " \n"], EMPTY),
}
WHOLE: dict[str, tuple[Any, str]] = {
    "bytes": (b"she sang", "is b'she sang', a bytes"),
    "a mapping": ({"text": TEXTS}, "a dict"),
    "a path": (Path("texts.txt"), "PosixPath"),
    "None": (None, "None"),
    "a number": (7, "7"),
}


@pytest.mark.parametrize(
    ("door", "kind"),
    tiers(
        [*diagonal(REFUSING, WRONG), *diagonal(REFUSING, WHOLE)], product(REFUSING, WRONG | WHOLE)
    ),
)
def test_what_is_no_list_of_texts_is_named(model: nn.Module, door: str, kind: str) -> None:
    wrong, named = (WRONG | WHOLE)[kind]
    if kind in WHOLE and door in BATCHES:
        named = r"batches: a batch is of type|the path of a file|no tensor in \['text'\]"
    with pytest.raises((InputError, ArgumentError), match=named):
        REFUSING[door](model, wrong)


def test_a_string_is_neither_a_choice_nor_a_behavior_nor_a_batch(model: nn.Module) -> None:
    with pytest.raises(ArgumentError, match=r"agreement: choices is 'she sang.*Give a Choice"):
        agreement(model, TEXT, tokenizer=TOKENIZER)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"behavior: batches holds the text 'she sang"):
        behavior("mine", TEXT, lambda output, batch: output)  # type: ignore[arg-type]
    roles = replace(make_roles(make_study()), model=fingerprint(model))
    with pytest.raises(ArgumentError, match=r"effects: behaviors is 'she sang.*Give a Behavior"):
        roles.effects(model, TEXT)  # type: ignore[arg-type]
    for batch in (TEXT, [TEXT], (TEXT,)):
        with pytest.raises(ArgumentError, match=r"costs: reference holds the text 'she sang"):
            costs(model, batch)
        with pytest.raises(ArgumentError, match=r"batch: 'she sang"):
            call_model(model, batch)


def test_a_single_batch_of_a_behavior_is_a_list_of_it(model: nn.Module) -> None:
    batch = {"input_ids": torch.tensor([[1, 2, 3]])}
    (read,) = behavior("mine", batch, lambda output, batch: output).batches
    assert read.inputs == batch


def test_pairs_keep_together() -> None:
    pairs = [("a", "b"), ("c", "d")]
    assert list_pairs("f", iter(["a", " ", "c"]), ("b", "", "d")) == pairs
    assert list_pairs("f", "a", "b") == pairs[:1]
    assert list_pairs("f", ["a", ""]) == [("a", "a")]
    with pytest.raises(ArgumentError, match="f: 2 texts and 1 targets"):
        list_pairs("f", ["a", "c"], "b")
    with pytest.raises(InputError, match="f: the target of pair 1 is empty, beside 'c'"):
        list_pairs("f", ["a", "c"], ["b", " "])
    with pytest.raises(InputError, match="f: the text of pair 0 is empty, beside 'b'"):
        list_pairs("f", ["", "c"], ["b", "d"])
    assert issubclass(InputError, HeadwiseError)
