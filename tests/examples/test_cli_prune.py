"""`headwise prune`, from a tiny Llama and its scores to a smaller one that loads."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import transformers

import headwise as hw
from command import headwise
from folders import write_llama
from headwise.corpora import read_pairs
from headwise.scoring import in_fifths, paired
from headwise.surgery import removal_order

WORDS = ("<pad>", "<s>", "</s>", "I", "work", "you", "he", "works", "they")
OPENED = "Loaded in a fresh process, the saved model gives the same outputs"
TEXT = "I work you work\nhe works\nthey work he works I work\nyou work they work\nhe works I\n"
LINES = TEXT.splitlines()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, a text, and the scores of its heads."""
    place = tmp_path_factory.mktemp("prune")
    (place / "some.txt").write_text(TEXT, "utf-8")
    write_llama(
        place / "model", WORDS, hidden_size=12, num_attention_heads=6, num_key_value_heads=3
    )
    arguments = ("importance", place / "model", "--text", place / "some.txt")
    assert headwise(*arguments, "-o", place / "scores.parquet").code == 0
    return place


def _prune(place: Path, out: str, *more: object) -> tuple[int, str, str]:
    by = ("--by", place / "scores.parquet", "-o", place / out)
    done = headwise("prune", place / "model", "--remove", 0.5, *by, *more)
    return done.code, done.out, done.err


def _loss(model: torch.nn.Module, tokenizer: Any, texts: Sequence[str]) -> float:
    """The mean over the texts of their loss per predicted token, as Transformers computes it."""
    ids = [tokenizer(line, return_tensors="pt")["input_ids"] for line in texts]
    with torch.no_grad():
        return sum(float(model(input_ids=x, labels=x).loss) for x in ids) / len(ids)


@pytest.mark.full
def test_the_command_prunes_like_the_library(place: Path) -> None:
    code, out, err = _prune(place, "plain", "--time")
    assert code == 0, err
    scores = hw.Scores.load(place / "scores.parquet")
    model = hw.load(place / "model")
    plan = hw.plan(scores, remove=0.5)
    lines = err.splitlines()
    # The removed heads and the savings are printed before the work begins.
    counted = hw.costs(model)
    known = hw.plan(scores, remove=0.5, costs=counted)
    assert "\n".join(str(known).splitlines()) in "\n".join(lines)
    assert lines.index(str(known).splitlines()[-1]) < lines.index(OPENED)
    assert plan.removed == known.removed
    small, ids = hw.load(place / "plain"), torch.tensor([[3, 4, 5, 4]])
    with torch.no_grad(), hw.ablate(model, list(plan.removed)):
        gated = model(input_ids=ids).logits
    with torch.no_grad():
        torch.testing.assert_close(small(input_ids=ids).logits, gated)
    assert "parameters of heads: " not in out
    assert re.search(r"^parameters: [\d,]+ before, [\d,]+ after", out, re.MULTILINE)
    assert "milliseconds of attention blocks: " in out
    assert "milliseconds of a pass: " in out
    assert f"The smaller model is in {place / 'plain'}" in out


@pytest.mark.full
def test_with_a_text_means_are_folded_and_curves_are_drawn(place: Path) -> None:
    code, out, err = _prune(place, "folded", "--text", place / "some.txt", "--curve", "--json")
    assert code == 0, err
    result = json.loads(out)
    model, tokenizer = hw.load(place / "model"), hw.load_tokenizer(place / "folded")
    small = hw.load(place / "folded")
    parameters = [sum(x.numel() for x in item.parameters()) for item in (model, small)]
    assert result["costs"]["parameters"] == parameters
    ids = [tokenizer(line, return_tensors="pt") for line in LINES]
    reference = [{"input_ids": item["input_ids"]} for item in ids]
    with torch.no_grad(), hw.ablate(model, result["removed"], "mean", reference[::2]):
        gated = model(**reference[0]).logits
    with torch.no_grad():
        torch.testing.assert_close(small(**reference[0]).logits, gated, rtol=1e-4, atol=1e-5)
    curves = pd.read_csv(place / "folded" / "curves.csv")
    assert sorted(set(curves["order"])) == ["half-gate", "random"]
    assert (place / "folded" / "curves.svg").read_text("utf-8").startswith("<?xml")
    # Every second text is used for recovery, the others for evaluation.
    scores, lines = hw.Scores.load(place / "scores.parquet"), LINES
    losses = [_loss(each, tokenizer, lines[1::2]) for each in (model, small)]
    quality = result["quality"]["nats per predicted token, mean over texts"]
    assert quality == pytest.approx(losses, rel=1e-4)
    drawn = hw.prune_curves(
        model, lines[1::2], {"half-gate": [removal_order(scores)[0]]}, reference=lines[::2],
        loss="lm", tokenizer=tokenizer, points=removal_order(scores)[1],
    )  # fmt: skip
    expected = drawn.frame(drawn.allowance())
    for name in ("loss", "elbow", "elbow.low", "elbow.high"):
        torch.testing.assert_close(
            torch.tensor(curves[name]).double(), torch.tensor(expected[name]).double()
        )
    [curve, band] = result["elbows"]
    assert (curve["order"], band["order"]) == ("half-gate", "random")
    assert curve["heads"] == drawn.elbow("half-gate", curve["allowed"]).heads


@pytest.mark.full
def test_the_pruned_model_recovers(place: Path) -> None:
    more = ("--text", place / "some.txt", "--recover", 5, "--rate", 3e-4, "--curve")
    code, out, err = _prune(place, "recovered", *more)
    assert code == 0, err
    curves = pd.read_csv(place / "recovered" / "curves.csv")
    assert set(curves["order"]) == {"half-gate", "half-gate, recovered", "random"}
    for order in ("half-gate", "half-gate, recovered", "random"):
        assert re.search(
            rf"^{order}: (≥ )?\d+ \(.*\d\) heads can be removed before the loss grows by \S+$",
            out,
            re.M,
        )
    model, tokenizer = hw.load(place / "model"), hw.load_tokenizer(place / "model")
    lines = LINES
    ids = [{"input_ids": torch.tensor([tokenizer(line)["input_ids"]])} for line in lines]
    plan = hw.plan(hw.Scores.load(place / "scores.parquet"), remove=0.5)
    small = hw.prune(model, plan, fold="mean", reference=ids[::2])
    lost = hw.recover(small, model, lines[::2], steps=5, rate=3e-4, tokenizer=tokenizer)
    assert f"full model: {lost[0]:.3g} at the first step, {lost[-1]:.3g} at the last" in err
    saved = hw.load(place / "recovered")
    with torch.no_grad():
        torch.testing.assert_close(saved(**ids[0]).logits, small(**ids[0]).logits)


@pytest.mark.full
def test_auto_removes_the_heads_at_the_elbow_and_states_its_bar(place: Path) -> None:
    """The bar holds for the heads that are cut: pairs of heads, which share keys and values."""
    text = ("--text", place / "some.txt")
    code, out, err = _prune(place, "auto", "--remove", "auto", "--quality", 0.02, *text)
    assert code == 0, err
    points = re.search(r"auto: the loss is measured at (\d+) numbers of heads, each in", err)
    assert points
    said = re.search(
        r"auto: (?:≥ )?(\d+).* of (\d+) heads can be removed before the loss grows", err
    )
    assert said
    assert re.search(
        r"by [\d.]+ \(nats per predicted token, mean over texts\), 0.02 of the full model's", err
    )
    model, tokenizer = hw.load(place / "model"), hw.load_tokenizer(place / "model")
    scores = hw.Scores.load(place / "scores.parquet")
    chosen_on, held_out = LINES[::2], LINES[1::2]
    curves = hw.prune_curves(
        model, chosen_on, {"order": [removal_order(scores)[0]]}, reference=chosen_on, loss="lm",
        tokenizer=tokenizer, points=removal_order(scores)[1],
    )  # fmt: skip
    assert int(said[1]) == curves.elbow("order", curves.allowance(0.02)).heads
    assert int(points[1]) == 1 + len(in_fifths(removal_order(scores)[1]))
    small = hw.load(place / "auto")
    assert len(scores.heads) - len(hw.costs(small).heads) == int(said[1])
    before, after = (_loss(each, tokenizer, chosen_on) for each in (model, small))
    assert after - before < 0.02 * before
    [row] = np.flatnonzero(curves.removed == int(said[1]))
    assert after == pytest.approx(curves.mean("order")[0, row], rel=1e-4)
    told = re.search(
        r"^nats per .*, mean over texts: (\S+) before, (\S+) after \(on every second text",
        out,
        re.M,
    )
    assert told
    losses = [_loss(each, tokenizer, held_out) for each in (model, small)]
    assert [float(told[1]), float(told[2])] == pytest.approx(losses, rel=1e-3)


@pytest.mark.full
def test_pairs_are_scored_by_their_task(place: Path, tmp_path: Path) -> None:
    words = [line.split() for line in LINES]
    rows = [f"{' '.join(first)},{' '.join(second)},{similarity}" for similarity, (first, second) in
            enumerate(zip(words * 2, words[1:] + words[::-1], strict=False))]  # fmt: skip
    (tmp_path / "pairs.csv").write_text("\n".join(rows))
    base = transformers.LlamaModel.from_pretrained(place / "model")
    base.save_pretrained(tmp_path / "base")
    hw.load_tokenizer(place / "model").save_pretrained(tmp_path / "base")
    pairs = ("--pairs", tmp_path / "pairs.csv")
    by = ("-o", tmp_path / "scores.csv", "--loss", "embedding")
    assert headwise("importance", tmp_path / "base", *pairs, *by).code == 0
    by = ("--by", tmp_path / "scores.csv", "--remove", 0.5, "-o", tmp_path / "small", "--curve")
    done = headwise("prune", tmp_path / "base", *by, *pairs)
    assert done.code == 0, done.err
    curves = pd.read_csv(tmp_path / "small" / "curves.csv")
    assert curves["spearman"].between(-1, 1).all()
    assert set(curves["order"]) == {"half-gate", "random"}
    # Half of the pairs choose how many heads may go before the correlation falls by 0.2.
    auto = ("--remove", "auto", "--measure", "spearman", "--quality", 0.2, "-o", tmp_path / "auto")
    done = headwise("prune", tmp_path / "base", *by[:2], *auto, *pairs, "--json")
    assert done.code == 0, done.err
    model, tokenizer = hw.load(tmp_path / "base"), hw.load_tokenizer(tmp_path / "base")
    inputs, loss = paired(read_pairs(tmp_path / "pairs.csv")[::2], model, tokenizer)
    scores = hw.Scores.load(tmp_path / "scores.csv")
    order, ends = removal_order(scores)
    drawn = hw.prune_curves(
        model,
        inputs,
        {"one": [order]},
        reference=inputs,
        loss=loss,
        points=in_fifths(ends),
    )
    within = drawn.scores["one"][0] > drawn.scores["one"][0, 0] - 0.2
    heads = drawn.removed[within.cumprod().sum() - 1]
    assert re.search(
        rf"auto: (≥ )?{heads} of 12 heads can be removed before spearman falls by 0.2", done.err
    )
    # Scores of another loss cannot be used with pairs.
    again = headwise("prune", place / "model", *pairs, "--curve", "--remove", 0.5, "-o",
                     tmp_path / "other", "--by", place / "scores.parquet")  # fmt: skip
    assert again.code == 2
    assert "--pairs with scores of the loss 'lm'" in again.err
    assert not (tmp_path / "other").exists()


@pytest.mark.full
def test_orders_of_other_methods_are_drawn_as_well(place: Path) -> None:
    model = hw.load(place / "model")
    lines, tokenizer = LINES, hw.load_tokenizer(place / "model")
    scores = hw.importance(model, lines, "gradient", tokenizer=tokenizer, rounds=3)
    scores.save(place / "gradient.parquet")
    curve = ("--text", place / "some.txt", "--curve", "--beside")
    code, out, err = _prune(place, "beside", *curve, place / "gradient.parquet")
    assert code == 0, err
    names = re.findall(
        r"^(.+): (?:≥ )?\d+ \(.*\d\) heads can be removed before the loss grows by \S+$", out, re.M
    )
    assert names == ["half-gate", "gradient, 3 rounds", "random"]
    order, steps = removal_order(scores)
    drawn = hw.prune_curves(
        model, lines[1::2], {"one": [order]}, reference=lines[::2],
        loss="lm", tokenizer=tokenizer, points=[0, *steps],
    )  # fmt: skip
    curves = pd.read_csv(place / "beside" / "curves.csv").set_index("order")
    assert curves.loc["gradient, 3 rounds", "loss"].tolist() == pytest.approx(drawn.mean("one")[0])
    # Two files of the same method, and one of another model.
    code, _, err = _prune(place, "none", *curve, place / "scores.parquet")
    assert code == 2
    assert "two orders by half-gate" in err
    replace(scores, model="0123").save(place / "foreign.parquet")
    code, _, err = _prune(place, "none", *curve, place / "foreign.parquet")
    assert code == 2
    assert "--beside has scores of the model 0123" in err
    assert not (place / "none").exists()


def test_scores_of_another_model_are_refused(place: Path) -> None:
    changed = hw.load(place / "model")
    with torch.no_grad():
        next(changed.parameters()).add_(1.0)
    changed.save_pretrained(place / "other")
    hw.load_tokenizer(place / "model").save_pretrained(place / "other")
    by = ("--by", place / "scores.parquet", "-o", place / "new")
    done = headwise("prune", place / "other", "--remove", 0.5, *by)
    assert done.code == 2
    assert "scores.parquet belong to the model" in done.err
    assert not (place / "new").exists()
