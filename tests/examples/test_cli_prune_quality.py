"""`headwise prune`: quality before and after on the given texts, and `--remove auto`."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import headwise as hw
from command import headwise
from folders import write_llama
from headwise.scoring import in_fifths
from headwise.surgery import removal_order

WORDS = ("<pad>", "<s>", "</s>", "I", "work", "you", "he", "works", "they")
TEXT = "I work you work\nhe works\nthey work he works I work\nyou work they work\nhe works I\n"
LINES = TEXT.splitlines()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, a text, and the scores of its heads."""
    place = tmp_path_factory.mktemp("quality")
    (place / "some.txt").write_text(TEXT, "utf-8")
    write_llama(
        place / "model", WORDS, hidden_size=12, num_attention_heads=6, num_key_value_heads=3
    )
    text = ("--text", place / "some.txt")
    assert headwise("importance", place / "model", *text, "-o", place / "scores.csv").code == 0
    return place


def _prune(place: Path, out: Path, *more: object) -> tuple[int, str, str]:
    by = ("--by", place / "scores.csv", "-o", out)
    done = headwise("prune", place / "model", *by, *more)
    return done.code, done.out, done.err


def _loss(model: torch.nn.Module, tokenizer: Any, texts: Sequence[str]) -> float:
    """The mean over the texts of their loss per predicted token, as Transformers computes it."""
    ids = [tokenizer(line, return_tensors="pt")["input_ids"] for line in texts]
    with torch.no_grad():
        return sum(float(model(input_ids=x, labels=x).loss) for x in ids) / len(ids)


@pytest.mark.full
def test_quality_is_that_of_both_models_on_every_second_text(place: Path, tmp_path: Path) -> None:
    """The others give the mean outputs that replace removed heads."""
    text = ("--text", place / "some.txt")
    code, out, err = _prune(place, tmp_path / "small", "--remove", 0.5, *text, "--json")
    assert code == 0, err
    before, after = json.loads(out)["quality"]["nats per predicted token, mean over texts"]
    tokenizer = hw.load_tokenizer(place / "model")
    models = [hw.load(place / "model"), hw.load(tmp_path / "small")]
    losses = [_loss(model, tokenizer, LINES[1::2]) for model in models]
    assert [before, after] == pytest.approx(losses, rel=1e-4)


@pytest.mark.full
def test_auto_removes_the_heads_at_the_elbow_and_states_its_bar(
    place: Path, tmp_path: Path
) -> None:
    """The bar holds for the heads that are cut: pairs of heads, which share keys and values."""
    text = ("--text", place / "some.txt")
    code, out, err = _prune(place, tmp_path / "small", "--remove", "auto", "--quality", 0.02, *text)
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
    scores = hw.Scores.load(place / "scores.csv")
    chosen_on, held_out = LINES[::2], LINES[1::2]
    curves = hw.prune_curves(
        model, chosen_on, {"order": [removal_order(scores)[0]]}, reference=chosen_on, loss="lm",
        tokenizer=tokenizer, points=removal_order(scores)[1],
    )  # fmt: skip
    assert int(said[1]) == curves.elbow("order", curves.allowance(0.02)).heads
    assert int(points[1]) == 1 + len(in_fifths(removal_order(scores)[1]))
    small = hw.load(tmp_path / "small")
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


@pytest.mark.parametrize("share", ["1.5", "-0.1", "many", "nan"])
def test_a_share_that_is_none_is_named(share: str, place: Path, tmp_path: Path) -> None:
    code, _, err = _prune(place, tmp_path / "small", f"--remove={share}")
    assert code == 2
    assert f"--remove {share}. Give a share above 0 and below 1, such as 0.3, or auto." in err


def test_auto_needs_two_halves(place: Path, tmp_path: Path) -> None:
    (tmp_path / "few.txt").write_text("he works\nI work\nyou work\n", "utf-8")
    text = ("--text", tmp_path / "few.txt")
    code, _, err = _prune(place, tmp_path / "small", "--remove", "auto", *text)
    assert code == 2
    assert "prune: --remove auto with 3 texts or pairs; half of them" in err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--remove", "auto"), "prune: --remove auto without a text. Add --text FILE"),
        (("--remove", "0.3", "--quality", 0.1), "--quality with --remove 0.3. Give --remove auto."),
        (("--remove", "0.3", "--measure", "loss"), "--measure with --remove 0.3. Give --remove au"),
        (("--remove", "auto", "--quality", 0), "--quality 0 lets nothing go. Give a number above"),
        (("--remove", "auto", "--measure", "spearman"), "--measure spearman without --pairs. Add"),
        (
            ("--remove", "auto", "--text", "some.txt", "--measure", "cosine"),
            "--measure cosine with scores of the loss 'lm'. Use loss with scores of lm",
        ),
        (
            ("--remove", "auto", "--text", "some.txt", "--quality", 1e-12),
            "--remove auto: without the first 2 heads the loss grows by more than",
        ),
    ],
)
def test_auto_refuses_a_bar_that_cannot_be_measured_or_kept(
    place: Path, tmp_path: Path, more: tuple[object, ...], message: str
) -> None:
    more = tuple(place / argument if argument == "some.txt" else argument for argument in more)
    code, _, err = _prune(place, tmp_path / "small", *more)
    assert code == 2
    assert message in err
    assert not (tmp_path / "small").exists()
