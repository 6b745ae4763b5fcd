"""Comparisons that would mean nothing are refused, with what does not fit."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

import headwise as hw
from headwise.corpora import SPECIALS
from headwise.errors import ArgumentError, HeadError, InputError
from headwise.lab import MiniGPT, MiniGPTConfig, make_tokenizer
from headwise.report import Comparison, compare_tables
from planted import TOKENIZER, WORDS, lines
from studies import make_roles, make_study
from tables_of_texts import make_table, with_heads

TEXTS = lines(2)


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
        hw.compare(_model(2), _model(3), TEXTS, tokenizer=TOKENIZER)


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
        hw.compare(model, model, TEXTS, tokenizer=(TOKENIZER, other))
    with pytest.raises(ArgumentError, match="tokenizer=None, and MiniGPT has none"):
        hw.compare(model, model, TEXTS)


def test_other_kinds_of_things_are_refused() -> None:
    model, table = _model(), make_table()
    with pytest.raises(ArgumentError, match="MiniGPT and HeadTable cannot be compared"):
        hw.compare(model, table)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="texts=None"):
        hw.compare(model, model, tokenizer=TOKENIZER)
    config = T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=50)
    with pytest.raises(ArgumentError, match=r"one of MiniGPT and T5For.* reads two"):
        hw.compare(model, T5ForConditionalGeneration(config), TEXTS, tokenizer=TOKENIZER)


@pytest.mark.parametrize(
    ("name", "value"), [("texts", TEXTS), ("tokenizer", TOKENIZER), ("max_tokens", 5)]
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


def test_a_page_is_html_and_a_file_holds_a_comparison(tmp_path: Path) -> None:
    comparison = compare_tables(make_table(), make_table(), draws=1)
    with pytest.raises(ArgumentError, match=r"page\.txt does not end in \.html"):
        comparison.report(tmp_path / "page.txt")
    table = make_table().save(tmp_path / "table.json")
    with pytest.raises(InputError, match=r"Comparison\.load: .*table\.json holds a table of"):
        Comparison.load(table)
    saved = comparison.save(tmp_path / "comparison.json")
    saved.write_text(saved.read_text("utf-8").replace('"texts": [\n  40,', '"texts": [\n  4, 4,'))
    with pytest.raises(InputError, match=r"comparison\.json is incomplete or damaged.*not pairs"):
        Comparison.load(saved)
