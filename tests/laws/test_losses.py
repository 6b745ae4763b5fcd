"""Losses of each text equal Hugging Face's own without padding, and their definitions."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn

from headwise.lab import MiniGPT, MiniGPTConfig
from headwise.scoring import EMBEDDING, find_loss
from oracles import padded

SIZES = {
    "vocab_size": 13,
    "hidden_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 3,
    "intermediate_size": 17,
    "max_position_embeddings": 19,
}
TEXTS = [[5, 9, 7, 3, 11], [4, 6], [10, 3, 3, 12, 9, 1, 2]]


def _bert(kind: str, **more: Any) -> nn.Module:
    config = transformers.BertConfig(**SIZES, **more)
    return getattr(transformers, f"BertFor{kind}")(config).eval()


def _each_alone(model: nn.Module, labels: list[Any]) -> list[float]:
    """Hugging Face's own loss of each text, computed by itself."""
    return [
        model(input_ids=torch.tensor([ids]), labels=torch.tensor([label])).loss.item()
        for ids, label in zip(TEXTS, labels, strict=True)
    ]


def _ours(model: nn.Module, batch: dict[str, Any], name: str) -> np.ndarray:
    loss = find_loss(None, model, batch)
    assert loss.name == name
    with torch.no_grad():
        return loss.per_text(model(**batch), batch).numpy()


@pytest.mark.parametrize("side", ["right", "left"])
def test_the_language_model_loss_is_that_of_each_text_alone(side: str) -> None:
    config = transformers.LlamaConfig(**SIZES, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    model = transformers.LlamaForCausalLM(config).eval()
    losses = _ours(model, padded(TEXTS, side), "lm")
    np.testing.assert_allclose(losses, _each_alone(model, TEXTS), rtol=1e-5)


def test_the_mini_gpt_has_a_language_model_loss() -> None:
    model = MiniGPT(MiniGPTConfig(vocab_size=13, d_model=12, n_heads=3, n_layers=1)).eval()
    ids = torch.tensor([[5, 9, 7, 3]])
    expected = torch.nn.functional.cross_entropy(model(ids)[0, :-1], ids[0, 1:]).item()
    np.testing.assert_allclose(_ours(model, {"input_ids": ids}, "lm"), [expected], rtol=1e-6)


def test_the_masked_loss_counts_masked_tokens() -> None:
    model = _bert("MaskedLM")
    hidden = [[-100] * len(ids) for ids in TEXTS]
    for index, labels in enumerate(hidden):
        labels[index] = (
            TEXTS[index][min(index, len(TEXTS[index]) - 1)] if index < len(labels) else labels[0]
        )
    hidden[1][1] = 6
    batch = padded(TEXTS, "right")
    batch["labels"] = torch.full_like(batch["input_ids"], -100)
    for row, labels in enumerate(hidden):
        batch["labels"][row, : len(labels)] = torch.tensor(labels)
    np.testing.assert_allclose(
        _ours(model, batch, "masked-lm"), _each_alone(model, hidden), rtol=1e-5
    )


@pytest.mark.parametrize(
    ("more", "labels"),
    [
        ({"num_labels": 5}, [4, 0, 2]),
        ({"num_labels": 1}, [0.3, -1.0, 2.0]),
        ({"num_labels": 2, "problem_type": "multi_label_classification"}, [[1.0, 0.0]] * 3),
    ],
)
def test_a_label_loss_equals_that_of_the_models_head(
    more: dict[str, Any], labels: list[Any]
) -> None:
    model = _bert("SequenceClassification", **more)
    batch = padded(TEXTS, "right") | {"labels": torch.tensor(labels)}
    np.testing.assert_allclose(_ours(model, batch, "label"), _each_alone(model, labels), rtol=1e-5)


def test_labels_of_tokens_count_for_their_text() -> None:
    model = _bert("TokenClassification", num_labels=3)
    labels = [[token % 3 for token in ids] for ids in TEXTS]
    batch = padded(TEXTS, "right")
    batch["labels"] = torch.full_like(batch["input_ids"], -100)
    for row, text in enumerate(labels):
        batch["labels"][row, : len(text)] = torch.tensor(text)
    np.testing.assert_allclose(_ours(model, batch, "label"), _each_alone(model, labels), rtol=1e-5)


@pytest.mark.parametrize("side", ["right", "left"])
def test_the_embedding_loss_is_one_minus_the_cosine(side: str) -> None:
    states = torch.randn(2, 3, 7, 5)  # twice three texts
    batch = padded(TEXTS, side)
    loss = EMBEDDING
    full = loss.of(states[0], batch)
    losses = loss.per_text(states[1], batch, full)
    for text, ids in enumerate(TEXTS):
        tokens = slice(0, len(ids)) if side == "right" else slice(7 - len(ids), 7)
        x, y = (state[text, tokens].mean(0) for state in states)
        expected = 1 - torch.cosine_similarity(x, y, dim=0)
        torch.testing.assert_close(losses[text], expected)
    torch.testing.assert_close(loss.per_text(states[0], batch, full), torch.zeros(3))


def test_a_base_model_has_the_embedding_loss() -> None:
    model = transformers.BertModel(transformers.BertConfig(**SIZES))
    assert find_loss(None, model, padded(TEXTS, "right")).name == "embedding"


def test_any_function_of_output_and_batch_is_a_loss() -> None:
    def longest(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return output.abs().amax((1, 2)) * batch["weight"]

    batch = {"x": torch.zeros(3, 2), "weight": torch.tensor([1.0, 2.0, 3.0])}
    loss = find_loss(longest, nn.Identity(), batch)
    assert loss.name == "longest"
    assert loss.per_text(torch.ones(3, 5, 7), batch).tolist() == [1.0, 2.0, 3.0]
