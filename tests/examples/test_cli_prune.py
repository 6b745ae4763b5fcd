"""`headwise prune`, from a tiny Llama and its scores to a smaller one that loads."""

import json
import re
from pathlib import Path

import pandas as pd
import pytest
import torch
import transformers

import headwise as hw
from command import headwise
from folders import write_llama
from headwise.corpora import read_pairs
from headwise.scoring import paired
from headwise.surgery import plan_curves

WORDS = ("<pad>", "<s>", "</s>", "I", "work", "you", "he", "works", "they")
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
    done = headwise("prune", place / "model", *by, *more)
    return done.code, done.out, done.err


@pytest.mark.full
def test_the_command_folds_recovers_and_draws_like_the_library(place: Path) -> None:
    more = ("--remove", 0.5, "--text", place / "some.txt", "--recover", 5, "--rate", 3e-4)
    code, out, err = _prune(place, "recovered", *more, "--curve", "--json")
    assert code == 0, err
    facts = json.loads(out)
    model, tokenizer = hw.load(place / "model"), hw.load_tokenizer(place / "model")
    scores = hw.Scores.load(place / "scores.parquet")
    plan = hw.plan(scores, remove=0.5, costs=hw.costs(model))
    assert str(plan).splitlines()[-1] in err
    assert facts["removed"] == [*map(str, plan.removed)]
    ids = [{"input_ids": torch.tensor([tokenizer(line)["input_ids"]])} for line in LINES]
    small = hw.prune(model, plan, fold="mean", reference=ids[::2])
    lost = hw.recover(small, model, LINES[::2], steps=5, rate=3e-4, tokenizer=tokenizer)
    assert facts["recovery"] == pytest.approx([float(x) for x in lost], rel=1e-4)
    saved = hw.load(place / "recovered")
    with torch.no_grad():
        torch.testing.assert_close(saved(**ids[0]).logits, small(**ids[0]).logits)
    parameters = [sum(x.numel() for x in item.parameters()) for item in (model, small)]
    assert facts["costs"]["parameters"] == parameters
    # Every second text is used for recovery, the others for evaluation.
    with torch.no_grad():
        losses = [
            sum(float(each(**x, labels=x["input_ids"]).loss) for x in ids[1::2]) / len(ids[1::2])
            for each in (model, small)
        ]
    quality = facts["quality"]["nats per predicted token, mean over texts"]
    assert quality == pytest.approx(losses, rel=1e-4)
    drawn = plan_curves(
        model, LINES[1::2], scores, reference=LINES[::2], tokenizer=tokenizer, random=5
    )
    curves, expected = pd.read_csv(place / "recovered" / "curves.csv"), drawn.frame(0.1)
    assert [*curves["order"]] == [*expected["order"]]
    assert [*curves["loss"]] == pytest.approx([*expected["loss"]])
    assert (place / "recovered" / "curves.svg").read_text("utf-8").startswith("<?xml")


@pytest.mark.full
def test_within_removes_the_heads_that_plan_removes(place: Path) -> None:
    code, out, err = _prune(place, "within", "--within", 0.02, "--text", place / "some.txt")
    assert code == 0, err
    model, tokenizer = hw.load(place / "model"), hw.load_tokenizer(place / "model")
    scores, chosen_on = hw.Scores.load(place / "scores.parquet"), LINES[::2]
    curves = plan_curves(model, chosen_on, scores, reference=chosen_on, tokenizer=tokenizer)
    plan = hw.plan(scores, within=0.02, curves=curves)
    assert str(plan) in err
    assert len(hw.costs(hw.load(place / "within")).heads) == len(scores.heads) - len(plan.removed)
    assert re.search(r"^nats per .*: \S+ before, \S+ after \(on every second text", out, re.M)
    assert re.search(r"^parameters: [\d,]+ before, [\d,]+ after", out, re.M)


@pytest.mark.full
def test_pairs_are_scored_by_their_task(place: Path, tmp_path: Path) -> None:
    words = [line.split() for line in LINES]
    rows = [f"{' '.join(first)},{' '.join(second)},{similarity}" for similarity, (first, second) in
            enumerate(zip(words * 2, words[1:] + words[::-1], strict=False))]  # fmt: skip
    (tmp_path / "pairs.csv").write_text("\n".join(rows))
    base = transformers.LlamaModel.from_pretrained(place / "model")
    base.save_pretrained(tmp_path / "base")
    hw.load_tokenizer(place / "model").save_pretrained(tmp_path / "base")
    pairs, by = ("--pairs", tmp_path / "pairs.csv"), tmp_path / "scores.csv"
    done = headwise("importance", tmp_path / "base", *pairs, "-o", by, "--loss", "embedding")
    assert done.code == 0, done.err
    # Half of the pairs choose how many heads may go before the correlation falls by 0.2.
    arguments = ("--by", by, "--within", 0.2, "--measure", "score", "-o", tmp_path / "small")
    done = headwise("prune", tmp_path / "base", *arguments, *pairs, "--json")
    assert done.code == 0, done.err
    model, tokenizer = hw.load(tmp_path / "base"), hw.load_tokenizer(tmp_path / "base")
    inputs, loss = paired(read_pairs(tmp_path / "pairs.csv")[::2], model, tokenizer)
    curves = plan_curves(model, inputs, hw.Scores.load(by), reference=inputs, loss=loss)
    assert curves.of_score().allowance(0.2) == 0.2
    within = curves.scores["half-gate"][0] > curves.scores["half-gate"][0, 0] - 0.2
    heads = curves.removed[within.cumprod().sum() - 1]
    facts = json.loads(done.out)
    assert len(facts["removed"]) == heads
    assert "before the loss drop of spearman grows by 0.2" in facts["why"]
    assert "spearman" in facts["quality"]


def test_scores_of_another_model_are_refused(place: Path) -> None:
    changed = hw.load(place / "model")
    with torch.no_grad():
        next(changed.parameters()).add_(1.0)
    changed.save_pretrained(place / "other")
    hw.load_tokenizer(place / "model").save_pretrained(place / "other")
    by = ("--by", place / "scores.parquet", "-o", place / "new")
    done = headwise("prune", place / "other", "--remove", 0.5, *by)
    assert done.code == 2
    assert "plan: the costs are of the model" in done.err
    assert not (place / "new").exists()
