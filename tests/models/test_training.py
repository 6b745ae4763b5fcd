"""Watching a training: gradients are unchanged, and no token is counted twice."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from test_written_out import Block
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from headwise.layer import MultiHeadAttention
from headwise.watch import observe
from oracles import padded

TEXTS = [[5, 9, 7, 3, 11, 8, 2], [4, 6], [10, 3, 3, 12, 9]]
SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 13}


class Learner(nn.Module):
    """Two blocks of one kind, each recomputed in the backward pass."""

    def __init__(self, kind: Callable[[], nn.Module], reentrant: bool | None) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(13, 20), nn.Linear(20, 13)
        self.layers = nn.ModuleList([kind() for _ in range(2)])
        self.reentrant = reentrant

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            if self.reentrant is None:
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.head(x)


class TorchBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(20, 4, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(x, x, x, need_weights=False)[0]


class OurBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = MultiHeadAttention(20, 4, 2, dropout=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(x, causal=True)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "ours": OurBlock,
    "torchs": TorchBlock,
    "written": lambda: Block(dropout=0.1),
    "fused": lambda: Block(dropout=0.1, flash=True),
}


def _gradients(model: nn.Module, loss: Callable[[], Tensor]) -> list[Tensor]:
    torch.manual_seed(5)  # the same dropout
    model.zero_grad()
    loss().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def _assert_learns_alike(model: nn.Module, loss: Callable[[], Tensor], tokens: int) -> Any:
    plain = _gradients(model, loss)
    with observe(model) as watch:
        watched = _gradients(model, loss)
        again = _gradients(model, loss)
    assert len(plain) > 5
    for x, y, three in zip(plain, watched, again, strict=True):
        assert torch.equal(x, y)
        assert torch.equal(x, three)
    assert (watch.table().count("lse") == 2 * tokens).all()
    return watch.table()


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_train_alike_when_watched(kind: str, reentrant: bool | None) -> None:
    model = Learner(KINDS[kind], reentrant).train()
    batch = padded(TEXTS, "right")
    table = _assert_learns_alike(model, lambda: model(**batch).square().mean(), 14)
    assert [str(head) for head in table.heads[::4]] == ["L0.H0", "L1.H0"]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["Llama", "GPTNeo"])
def test_hugging_face_models_with_checkpoints_train_alike_when_watched(
    name: str, reentrant: bool
) -> None:
    config = {
        "Llama": lambda: transformers.LlamaConfig(
            **SIZES, num_key_value_heads=2, intermediate_size=24
        ),
        "GPTNeo": lambda: transformers.GPTNeoConfig(
            hidden_size=20, num_layers=2, num_heads=4, vocab_size=13, window_size=3,
            attention_types=[[["global", "local"], 1]], max_position_embeddings=16,
        ),
    }[name]()  # fmt: skip
    model = getattr(transformers, f"{name}ForCausalLM")(config).train()
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    batch = padded(TEXTS, "right")

    def loss() -> Tensor:
        return model(**batch, labels=batch["input_ids"], use_cache=False).loss

    _assert_learns_alike(model, loss, 14)


@pytest.mark.parametrize("kind", ["written", "fused"])
def test_a_step_under_autocast_trains_alike_when_watched(kind: str) -> None:
    model = Learner(KINDS[kind], None).train()
    batch = padded(TEXTS, "right")

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(**batch).float().square().mean()

    table = _assert_learns_alike(model, loss, 14)
    with torch.no_grad(), observe(model.eval()) as exact:
        model(**batch)
    for name in ("entropy", "lse", "max_logit"):
        np.testing.assert_allclose(table.mean(name), exact.table().mean(name), atol=0.05)
