"""What the benchmarks of statistics and of published protocols decide by themselves."""

import pytest
import torch
from scipy.stats import binom

from benchmarks.evidence import _languages, _pruning_material, _simulations, encoder
from tiers import tiers


@pytest.mark.parametrize(
    ("candidates", "others", "repeats"),
    tiers([(6, "noise", 10)], [(3, "noise", 100), (6, "place", 100)]),
)
def test_a_planted_head_of_a_task_is_found(candidates: int, others: str, repeats: int) -> None:
    """One that is right in 90 % of 60 examples, in at least 80 % of the _simulations."""
    found, unscreened, wrong = _simulations.task_outcomes(60, candidates, others, 0.9, repeats)
    assert found >= 0.8
    assert unscreened <= found
    assert wrong <= most(repeats)


@pytest.mark.parametrize(
    ("candidates", "others", "repeats"),
    tiers([(2, "noise", 10)], [(2, "place", 200), (3, "rule", 200), (6, "rule", 200)]),
)
def test_no_head_of_a_task_is_found_where_none_is(
    candidates: int, others: str, repeats: int
) -> None:
    for examples in (60, 120) if repeats > 10 else (60,):
        _, _, wrong = _simulations.task_outcomes(examples, candidates, others, None, repeats)
        assert wrong <= most(repeats)


def most(repeats: int) -> float:
    """The largest share of simulations that a rate of 5 % gives with a probability of 99 %."""
    return float(binom.ppf(0.99, repeats, 0.05)) / repeats


def test_each_sentence_of_a_language_has_one_masked_verb_whose_number_is_scored() -> None:
    language = _languages.attracted()
    tokenizer = _languages.new_tokenizer(language.vocabulary)
    texts = encoder.sentences(language, 40, seed=0)
    batches = _pruning_material.with_labels(texts, language, tokenizer)
    assert sum(len(batch["input_ids"]) for batch in batches) == 40
    partner = _pruning_material.other_forms(texts, language, tokenizer)
    loss = _pruning_material.number_of_verbs(partner)
    for batch in batches:
        masked = batch["input_ids"] == tokenizer.convert_tokens_to_ids(_languages.MASK)
        assert masked.sum(1).tolist() == [1] * len(masked)
        assert torch.equal(masked, batch["labels"] != -100)
        verbs = batch["labels"][masked]
        assert torch.equal(partner[partner[verbs]], verbs)
        assert not (partner[verbs] == verbs).any()
        logits = torch.nn.functional.one_hot(batch["labels"].clamp(0), len(tokenizer)).float()
        output = type("Output", (), {"logits": logits})
        assert loss.score.of(loss.score.read(output, batch)) == 1.0
        output.logits = -logits
        assert loss.score.of(loss.score.read(output, batch)) == 0.0
