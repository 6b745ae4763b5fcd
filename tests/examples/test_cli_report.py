"""`headwise report` with saved studies, and the sections of examples and of removing heads."""

import json
from pathlib import Path

import pytest

import headwise as hw
from command import headwise
from folders import write_llama
from headwise.corpora import read_answers

WORDS = ("<pad>", "<s>", "</s>", "I", "work", "you", "he", "works", "they")
LINES = ["I work you work", "he works", "they work he works I work", "you work they work"] * 8


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, texts, and a study that was saved beside its page."""
    place = tmp_path_factory.mktemp("report")
    (place / "some.txt").write_text("\n".join(LINES), "utf-8")
    answers = [{"text": line[:-5], "right": " you", "other": " they"} for line in LINES[::3]]
    (place / "answers.jsonl").write_text("\n".join(map(json.dumps, answers)), "utf-8")
    write_llama(place / "model", WORDS, hidden_size=12, num_attention_heads=6)
    done = headwise(
        "report", place / "model", "--text", place / "some.txt", "--no-roles", "--pruning",
        "--examples", place / "answers.jsonl", "--save", place / "study", "-o", place / "page.html",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert f"The study is saved in {place / 'study'}" in done.err
    return place


def test_a_saved_study_is_drawn_again(place: Path) -> None:
    done = headwise("report", "--study", place / "study", "-o", place / "again.html")
    assert done.code == 0, done.err
    assert (place / "again.html").read_bytes() == (place / "page.html").read_bytes()


def test_effects_are_those_of_the_examples(place: Path) -> None:
    study = hw.load_study(place / "study")
    model, tokenizer = hw.load(place / "model"), hw.load_tokenizer(place / "model")
    expected = hw.effects(model, read_answers(place / "answers.jsonl"), tokenizer=tokenizer)
    assert study.effects is not None
    assert study.effects.frame().equals(expected.frame())
    assert 'id="effects"' in (place / "page.html").read_text("utf-8")


def test_pruning_is_scored_on_one_half_and_measured_on_the_other(place: Path) -> None:
    study = hw.load_study(place / "study")
    model, tokenizer = hw.load(place / "model"), hw.load_tokenizer(place / "model")
    assert study.scores is not None
    assert study.curves is not None
    expected = hw.importance(model, LINES[::2], tokenizer=tokenizer)
    assert study.scores.order() == expected.order()
    curves = hw.prune_curves(
        model, LINES[1::2], {"half-gate": [expected.order()]}, reference=LINES[::2],
        tokenizer=tokenizer,
    )  # fmt: skip
    assert study.curves.frame().equals(curves.frame())
    heads = curves.elbow("half-gate", curves.allowance(0.01)).heads
    assert heads == (0 if study.plan is None else len(study.plan.removed))
    assert 'id="pruning"' in (place / "page.html").read_text("utf-8")


def test_two_saved_studies_are_compared(place: Path) -> None:
    done = headwise("compare", place / "study", place / "study")
    assert done.code == 0, done.err
    assert "heads differ on 32 texts: no difference is shown." in done.out
