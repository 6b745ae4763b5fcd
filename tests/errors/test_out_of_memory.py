"""When memory runs out, batches are halved, which is said once; the results stay the same."""

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.errors import UnsupportedError
from headwise.lab import MiniGPT, MiniGPTConfig
from headwise.scoring._gated_model import GatedModel
from planted import TOKENIZER, WORDS

TEXTS = ["a b c d", "b c a", "c c b a d", "d a", "a a b", "b d c", "a d d b"]


class Tight(MiniGPT):
    """A model for which a batch above a limit is too large."""

    limit, calls = 2, 0
    message = "CUDA out of memory."
    error: type[Exception] = torch.OutOfMemoryError

    def forward(self, input_ids: torch.Tensor, **inputs: object) -> torch.Tensor:
        self.calls += 1
        if len(input_ids) > self.limit:
            raise self.error(self.message)
        return super().forward(input_ids, **inputs)


@pytest.fixture
def model() -> Tight:
    torch.manual_seed(0)
    return Tight(MiniGPTConfig(60, context=24, d_model=12, n_heads=4, n_layers=2)).eval()


@pytest.mark.parametrize("method", ["half-gate", "ablation"])
def test_importance_halves_the_batch_and_says_so_once(method: str, model: Tight) -> None:
    model.limit = 99
    options = {"method": method, "tokenizer": TOKENIZER}
    expected = hw.importance(model, TEXTS, **options)
    model.limit = 2
    with pytest.warns(UserWarning, match="importance: out of memory with 7 texts") as said:
        scores = hw.importance(model, TEXTS, **options)
    assert len(said) == 1
    np.testing.assert_allclose(scores.per_text, expected.per_text, rtol=1e-4, atol=1e-6)


def test_a_study_halves_the_batch_and_counts_each_text_once(model: Tight) -> None:
    model.limit = 99
    expected = hw.study(model, TOKENIZER, TEXTS).table
    model.limit = 2
    with pytest.warns(UserWarning, match="study: out of memory with 7 texts in a batch") as said:
        table = hw.study(model, TOKENIZER, TEXTS).table
    assert len(said) == 1
    for name in expected.statistics:
        np.testing.assert_array_equal(table.count(name), expected.count(name))
        np.testing.assert_allclose(table.mean(name), expected.mean(name), rtol=1e-5, atol=1e-6)


@pytest.mark.full
def test_find_roles_halves_the_batch_and_says_so_once_for_each_set_of_texts(
    model: Tight, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [" ".join(np.random.default_rng(n).choice(WORDS, 8)) for n in range(70)]
    monkeypatch.setattr(Tight, "limit", 999)  # of null models, too
    expected = hw.find_roles(model, TOKENIZER, texts).rows
    monkeypatch.setattr(Tight, "limit", 20)
    with pytest.warns(UserWarning, match=r"find_roles: out of memory with \d+ texts") as said:
        rows = hw.find_roles(model, TOKENIZER, texts).rows
    assert len(said) == 3  # the texts, sequences that repeat, and their controls
    np.testing.assert_array_equal(rows["n"], expected["n"])
    np.testing.assert_allclose(rows["effect"], expected["effect"], atol=1e-6)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (torch.OutOfMemoryError, "CUDA out of memory."),
        (RuntimeError, "DefaultCPUAllocator: can't allocate memory"),
        (RuntimeError, "another error"),
    ],
)
@pytest.mark.filterwarnings("ignore:importance. out of memory")
def test_what_a_single_text_raises_is_raised(
    error: type[Exception], message: str, model: Tight
) -> None:
    model.limit, model.error, model.message = 0, error, message
    with pytest.raises(error, match=message):
        hw.importance(model, [{"input_ids": torch.tensor([[4, 5, 6]] * 4)}])
    assert model.calls == (1 if message == "another error" else 3)


@pytest.mark.filterwarnings("ignore:importance. out of memory")
def test_batches_whose_rows_are_parts_of_texts_are_not_halved(
    model: Tight, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GatedModel, "rows_per_text", 2)
    with pytest.raises(UnsupportedError, match="out of memory, and 2 rows of a batch are one"):
        hw.importance(model, [{"input_ids": torch.tensor([[4, 5, 6]] * 4)}])
