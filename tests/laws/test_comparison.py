"""Comparisons find what was changed, nothing else, and nothing at all in a model and itself."""

import copy
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import headwise as hw
from folders import tiny_t5
from headwise.lab import MiniGPT, MiniGPTConfig
from headwise.report import Comparison, compare_tables
from headwise.report.page import render
from headwise.tables import Head, HeadTable, ratio_interval
from planted import TOKENIZER, lines
from studies import make_roles, make_study
from tables_of_texts import make_table, of_texts, with_heads

HOSTILE = "</style><script>alert(1)</script><img src=x onerror=alert(1)> \x1b[31m\u202e"
TEXTS = lines(32)


def mini(heads: int = 4, layers: int = 3) -> MiniGPT:
    torch.manual_seed(0)
    config = MiniGPTConfig(
        vocab_size=len(TOKENIZER.get_vocab()),
        n_layers=layers,
        d_model=32,
        n_heads=heads,
        context=48,
    )
    return MiniGPT(config)


@pytest.fixture(scope="module")
def model() -> MiniGPT:
    return mini()


@given(seed=st.integers(0, 2**16))
@settings(max_examples=5)
def test_a_table_and_itself_have_exactly_no_difference(seed: int) -> None:
    table = make_table(seed=seed)
    comparison = compare_tables(table, table, draws=600)
    assert comparison.paired
    assert (comparison.frame()["difference"] == 0).all()
    assert (comparison.frame()[["ci_low", "ci_high"]] == 0).all(axis=None)
    assert (comparison.frame()["p_adj"] == 1).all()
    assert comparison.summary == "0 of 12 heads differ on 40 texts: no difference is shown."


def test_a_model_and_itself_have_exactly_no_difference(model: MiniGPT) -> None:
    comparison = hw.compare(model, copy.deepcopy(model), TEXTS, tokenizer=TOKENIZER)
    rows = comparison.frame().dropna(subset="difference")
    assert len(rows) > 100
    assert (rows["difference"] == 0).all()
    assert comparison.changed().empty


def _alarms(draws: int, texts: int, resamples: int) -> int:
    """How many comparisons of two halves of texts name a difference."""
    table = make_table(texts=4 * texts)
    alarms = 0
    for draw in range(draws):
        order = np.random.default_rng(draw).permutation(4 * texts)
        halves = (of_texts(table, part) for part in (order[:texts], order[texts : 2 * texts]))
        alarms += len(compare_tables(*halves, draws=resamples).changed()) > 0
    return alarms


def test_halves_of_the_texts_of_one_model_rarely_differ() -> None:
    # 40 comparisons at a rate of 5 %: more than 6 in one case of a hundred.
    assert _alarms(40, 30, 600) <= 6


@pytest.mark.full
@pytest.mark.parametrize("texts", [30, 60])
def test_halves_differ_in_one_case_of_twenty_at_most(texts: int) -> None:
    # Three standard errors of a rate of .05 above it.
    assert _alarms(400, texts, 1000) <= 400 * (0.05 + 3 * np.sqrt(0.05 * 0.95 / 400))


def test_other_texts_are_independent_samples() -> None:
    comparison = compare_tables(make_table(seed=1), make_table(texts=50, seed=2), draws=600)
    assert not comparison.paired
    assert "40 texts before and 50 others after" in comparison.summary
    rows = comparison.frame()
    assert (rows["ci_low"] < rows["ci_high"]).all()


def test_a_paired_interval_is_that_of_the_differences() -> None:
    before, after = make_table(seed=3), make_table(seed=4)
    after = replace(  # the same texts: the same numbers of rows
        before,
        totals={
            name: type(sums).of_texts(
                after.per_text(name).total, sums.per_text.count, sums.maximum, keep=True
            )
            for name, sums in before.totals.items()
        },
    )
    comparison = compare_tables(before, after, draws=600)
    assert comparison.paired
    for name in before.statistics:
        parts = before.per_text(name), after.per_text(name)
        low, high = ratio_interval(parts[1].total - parts[0].total, parts[0].count)
        assert comparison.values("ci_low", name) == pytest.approx(low)
        assert comparison.values("ci_high", name) == pytest.approx(high)


def test_rounding_is_no_difference() -> None:
    table = make_table()
    noise = np.random.default_rng(0)
    totals = {}
    for name, sums in table.totals.items():
        parts = sums.per_text
        moved = parts.total + 5e-6 * parts.count * noise.random(parts.total.shape)
        totals[name] = type(sums).of_texts(moved, parts.count, sums.maximum, keep=True)
    rounded = replace(table, totals=totals)
    assert compare_tables(table, rounded, draws=600).changed().empty
    assert len(compare_tables(table, rounded, tolerance=0.0, draws=600).changed()) > 0


@pytest.mark.parametrize("seed", range(4))
def test_a_planted_difference_is_found_and_no_other(seed: int) -> None:
    head = Head("", seed % 3, seed)
    table = make_table(seed=seed)
    moved = make_table(seed=seed, shifts={"first": {head: 0.02}})
    comparison = compare_tables(table, moved, draws=600)
    assert comparison.changed()[["name", "statistic"]].values.tolist() == [[str(head), "first"]]
    [row] = comparison.changed().to_dict("records")
    assert row["difference"] == pytest.approx(0.02)
    assert row["ci_low"] <= 0.02 + 1e-9
    assert comparison.largest().nonzero()[0].tolist() == [table.heads.index(head)]


def _zero(model: MiniGPT, head: int) -> list[int]:
    model.blocks[1].attention.out_proj.weight[:, 8 * head : 8 * head + 8] = 0
    return [head]


def _scale(model: MiniGPT, head: int) -> list[int]:
    model.blocks[1].attention.q_proj.weight[8 * head : 8 * head + 8] *= 1.5
    return [head]


def _swap(model: MiniGPT, head: int) -> list[int]:
    attention = model.blocks[1].attention
    order = torch.arange(32).view(4, 8)
    order[[head, head - 1]] = order[[head - 1, head]].clone()
    for name in ("q_proj", "k_proj", "v_proj"):
        linear = getattr(attention, name)
        linear.weight.copy_(linear.weight[order.flatten()].clone())
    attention.out_proj.weight.copy_(attention.out_proj.weight[:, order.flatten()].clone())
    return [head, head - 1]


@pytest.mark.parametrize("change", [_zero, _scale, _swap])
def test_a_changed_head_is_found_and_nothing_upstream(model: MiniGPT, change: Any) -> None:
    after = copy.deepcopy(model)
    with torch.no_grad():
        heads = {f"L1.H{head}" for head in change(after, 2)}
    comparison = hw.compare(model, after, TEXTS, tokenizer=TOKENIZER)
    changed = set(comparison.changed()["name"])
    assert heads <= changed
    assert {name for name in changed if name < "L2"} == heads
    if change is _swap:  # the model computes the same
        assert changed == heads


def test_heads_of_a_pruned_model_are_matched_by_their_original_names(model: MiniGPT) -> None:
    small = hw.prune(model, {0: [1], 2: [0, 3]})
    comparison = hw.compare(model, small, TEXTS, tokenizer=TOKENIZER)
    assert comparison.only("only before") == ["L0.H1", "L2.H0", "L2.H3"]
    rows = comparison.frame().drop_duplicates("name").set_index("name")
    assert rows.loc["L2.H1", ["before_head", "after_head"]].tolist() == ["L2.H1", "L2.H0"]
    assert rows.loc["L0.H1", ["before_head", "after_head"]].tolist() == ["L0.H1", ""]
    changed = set(comparison.changed()["name"])
    assert changed  # later layers read something else
    assert all(Head.parse(name).layer > 0 for name in changed)
    assert np.isnan(comparison.largest()[comparison.heads.index(Head("", 0, 1))])
    backwards = hw.compare(small, model, TEXTS, tokenizer=TOKENIZER)
    assert backwards.only("only after") == ["L0.H1", "L2.H0", "L2.H3"]


def test_pieces_of_a_text_count_as_one_text(model: MiniGPT) -> None:
    whole = hw.compare(model, model, TEXTS, tokenizer=TOKENIZER)
    pieces = hw.compare(model, model, TEXTS, tokenizer=TOKENIZER, max_tokens=6)
    assert whole.texts == pieces.texts == (32, 32)


def test_too_few_texts_are_not_tested() -> None:
    table = make_table(texts=12)
    moved = make_table(texts=12, shifts={"first": {Head("", 0, 0): 0.5}})
    comparison = compare_tables(table, moved)
    assert set(comparison.frame()["outcome"]) == {"not tested: 12 texts, 30 needed"}
    assert comparison.summary == "12 heads compared: not tested: 12 texts, 30 needed."
    assert comparison.values("difference", "first")[0] == pytest.approx(0.5)


def _studies(lost: bool = True) -> tuple[HeadTable, HeadTable, Any, Any]:
    table = make_table(layers=2)
    study = make_study(2, 4)
    before, after = make_roles(study, [0, 3]), make_roles(study, [3, 5] if lost else [0, 3])
    tables = [replace(table, model=roles.model) for roles in (before, after)]
    return tables[0], tables[1], before, after


def test_roles_are_won_lost_and_kept() -> None:
    before, after, was, now = _studies()
    comparison = compare_tables(before, after, (was, now), draws=600)
    assert comparison.roles is not None
    changes = dict(zip(comparison.roles["name"], comparison.roles["change"], strict=True))
    assert changes == {"L0.H0": "lost", "L0.H3": "kept", "L1.H1": "won"}
    assert "1 lost" in comparison.summary


def test_a_role_goes_with_its_head() -> None:
    before, _, was, now = _studies()
    kept = [head for head in before.heads if str(head) not in ("L0.H0", "L1.H1")]
    small = replace(with_heads(before, kept), model=now.model)
    comparison = compare_tables(before, small, (was, was), draws=600)
    assert comparison.roles is not None
    changes = dict(zip(comparison.roles["name"], comparison.roles["change"], strict=True))
    assert changes["L0.H0"] == "head removed"


@pytest.mark.parametrize("ending", [".parquet", ".csv", ".json"])
def test_what_was_saved_loads_equal(ending: str, tmp_path: Path) -> None:
    before, after, was, now = _studies()
    small = with_heads(before, before.heads[1:])
    for pair in ((before, after, (was, now)), (before, small, None)):
        comparison = replace(compare_tables(*pair, draws=600), titles=("a", HOSTILE))
        loaded = Comparison.load(comparison.save(tmp_path / f"comparison{ending}"))
        pd.testing.assert_frame_equal(loaded.frame(), comparison.frame())
        if comparison.roles is not None:
            pd.testing.assert_frame_equal(loaded.roles, comparison.roles)
        for name in ("titles", "models", "texts", "paired", "tolerance", "versions", "summary"):
            assert getattr(loaded, name) == getattr(comparison, name)


def test_the_page_of_a_study_shows_the_heads_that_differ(tmp_path: Path) -> None:
    table = make_table(layers=2)
    moved = make_table(layers=2, shifts={"first": {Head("", 0, 1): 0.1, Head("", 1, 2): -0.05}})
    comparison = compare_tables(
        replace(table, model=make_study().table.model),
        with_heads(moved, moved.heads[1:]),
        titles=("a", HOSTILE),
        draws=600,
    )
    study = make_study(2, 4).with_comparison(comparison)
    html = render(hw.load_study(study.save(tmp_path / "study")))
    assert html == render(study)
    section = html[html.index('<section id="comparison"') :]
    section = section[: section.index("</section>")]
    assert re.findall(r'"row">(\S+)</th><td><bdi>(.*?)<', section) == [
        ("L0.H1", "On the first token"),
        ("L1.H2", "On the first token"),
    ]
    assert section.count("untested") == 1
    assert re.findall(r"<text[^>]*>([+\u2212])", section) == ["+", "\u2212"]
    assert "<img" not in html
    assert "comparison" not in render(make_study(2, 4)).partition("<style")[0]


def test_a_figure_draws_differences() -> None:
    table = make_table()
    moved = make_table(shifts={"first": {Head("", 1, 2): 0.05}})
    comparison = compare_tables(table, moved, draws=600)
    [image] = comparison.plot("first").get_images()
    assert image.get_array()[1, 2] == pytest.approx(0.05)
    [image] = comparison.plot().get_images()
    assert np.argmax(image.get_array()) == 6


def test_an_encoder_decoder_is_compared_in_all_its_stacks() -> None:
    torch.manual_seed(0)
    model = tiny_t5(vocab_size=len(TOKENIZER.get_vocab()))
    comparison = hw.compare(model, model, TEXTS[:2], tokenizer=TOKENIZER)
    assert {head.stack for head in comparison.heads} == {"encoder", "decoder", "decoder.cross"}
