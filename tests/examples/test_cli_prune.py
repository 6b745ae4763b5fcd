"""`headwise prune`, from a tiny Llama and its scores to a smaller one that loads."""

import json
from pathlib import Path

import pandas as pd
import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

import headwise as hw
from command import headwise

WORDS = ["<pad>", "<s>", "</s>", "I", "work", "you", "he", "works", "they"]
TEXT = "I work you work\nhe works\nthey work he works I work\n"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, a text, and the scores of its heads."""
    place = tmp_path_factory.mktemp("prune")
    (place / "some.txt").write_text(TEXT, "utf-8")
    words = Tokenizer(WordLevel({word: at for at, word in enumerate(WORDS)}, "<pad>"))
    words.pre_tokenizer = Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>")
    tokenizer.save_pretrained(place / "model")
    config = transformers.LlamaConfig(
        vocab_size=len(WORDS), hidden_size=12, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=3, intermediate_size=16, max_position_embeddings=40,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(3)
    transformers.LlamaForCausalLM(config).save_pretrained(place / "model")
    arguments = ("importance", place / "model", "--text", place / "some.txt")
    assert headwise(*arguments, "-o", place / "scores.parquet").code == 0
    return place


def _prune(place: Path, out: str, *more: object) -> tuple[int, str, str]:
    by = ("--by", place / "scores.parquet", "-o", place / out)
    done = headwise("prune", place / "model", "--remove", 0.5, *by, *more)
    return done.code, done.out, done.err


def test_the_smaller_model_is_the_library_s(place: Path) -> None:
    code, out, err = _prune(place, "plain", "--time")
    assert code == 0, err
    scores = hw.Scores.load(place / "scores.parquet")
    model = hw.load(place / "model")
    plan = hw.plan(scores, remove=0.5)
    assert f"6 heads go ({plan.why}): {', '.join(map(str, plan.removed))}" in err
    small, ids = hw.load(place / "plain"), torch.tensor([[3, 4, 5, 4]])
    with torch.no_grad(), hw.ablate(model, list(plan.removed)):
        gated = model(input_ids=ids).logits
    with torch.no_grad():
        torch.testing.assert_close(small(input_ids=ids).logits, gated)
    counted = hw.costs(model)
    for name in counted.own:
        before, after = counted.after((), name), counted.after(plan.removed, name)
        assert f"{name} of heads: {before:g} before, {after:g} after (-50.0%)" in out
    assert "milliseconds of attention blocks: " in out
    assert "milliseconds of a pass: " in out
    assert f"The smaller model is in {place / 'plain'}" in out


def test_on_a_text_the_means_stay_and_curves_are_drawn(place: Path) -> None:
    code, out, err = _prune(place, "folded", "--text", place / "some.txt", "--curve", "--json")
    assert code == 0, err
    told = json.loads(out)
    model, tokenizer = hw.load(place / "model"), hw.load_tokenizer(place / "folded")
    small = hw.load(place / "folded")
    parameters = [sum(x.numel() for x in one.parameters()) for one in (model, small)]
    assert told["costs"]["parameters"] == parameters
    ids = [tokenizer(line, return_tensors="pt") for line in TEXT.splitlines()]
    reference = [{"input_ids": one["input_ids"]} for one in ids]
    with torch.no_grad(), hw.ablate(model, told["removed"], "mean", reference):
        gated = model(**reference[0]).logits
    with torch.no_grad():
        torch.testing.assert_close(small(**reference[0]).logits, gated, rtol=1e-4, atol=1e-5)
    curves = pd.read_csv(place / "folded" / "curves.csv")
    assert sorted(set(curves["order"])) == ["half-gate", "random"]
    assert (place / "folded" / "curves.svg").read_text("utf-8").startswith("<svg")


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ((), "taken is there already. Add --force"),
        (("--force", "--curve"), "--curve without a text"),
        (("--force", "--remove", 0.99), "would empty a layer"),
        (("--force", "--by", "none.csv"), r"none.csv does not exist"),
        (("--force", "--text", "none.txt"), r"none.txt cannot be read"),
    ],
)
def test_what_is_refused_leaves_what_was_there(
    place: Path, more: tuple[object, ...], told: str
) -> None:
    (place / "taken").mkdir(exist_ok=True)
    (place / "taken" / "mine").write_text("mine")
    code, out, err = _prune(place, "taken", *more)
    assert (code, out) == (2, "")
    assert told in err
    assert (place / "taken" / "mine").read_text() == "mine"


def test_scores_of_another_model_are_refused(place: Path) -> None:
    other = hw.load(place / "model")
    with torch.no_grad():
        next(other.parameters()).add_(1.0)
    other.save_pretrained(place / "other")
    hw.load_tokenizer(place / "model").save_pretrained(place / "other")
    by = ("--by", place / "scores.parquet", "-o", place / "new")
    done = headwise("prune", place / "other", "--remove", 0.5, *by)
    assert done.code == 2
    assert "the plan is for the model" in done.err
    assert not (place / "new").exists()
