"""QK-clip on every architecture: exactly the heads over the bar, by exactly their factors."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import zoo
from torch import nn

from headwise.errors import UnsupportedError
from headwise.models import Hooks
from headwise.monitor import HeadMonitor, QKClip
from tiers import tiers

IDS = torch.randint(5, 20, (2, 7), generator=torch.Generator().manual_seed(0))

# Why no clip can be made of these, of a kind each.
UNKNOWN = (
    "BloomForCausalLM", "DebertaModel", "DebertaV2Model", "FalconAlibi", "FlaubertModel",
    "MPNetModel", "MptForCausalLM", "XLMModel", "XLNetModel",
)  # fmt: skip
SHARED_GAIN = ("Gemma3", "Qwen3", "Qwen3Moe")
INEXACT = ("IBertModel",)  # it rounds its weights to whole numbers
REFUSED = {
    **dict.fromkeys(UNKNOWN, "the largest logit of .* is unknown"),
    **dict.fromkeys(SHARED_GAIN, "share the weights of .*q_norm"),
    **dict.fromkeys(INEXACT, "does not scale its logits"),
}
_FEW = ("FalconMultiQuery", "GPT2", "GPTJForCausalLM")


def _training(name: str) -> nn.Module:
    """A model that trains, of which two passes over the same inputs are the same."""
    model = zoo.make(name).train()
    model.config.use_cache = False  # a cache would grow from one pass to the next
    return model


class Passes:
    """Passes of a model in which each attention reads what it read in the first one."""

    def __init__(self, model: nn.Module, sites: set[str]) -> None:
        self._model, self._sites = model, sites
        self._inputs: dict[str, list[Any]] = {}

    def run(self) -> None:
        first = not self._inputs
        with Hooks() as hooks:
            for name in self._sites:
                calls = iter(self._inputs.setdefault(name, []))

                def read(
                    _: Any, args: Any, kwargs: Any, name: str = name, calls: Any = calls
                ) -> Any:
                    if first:
                        self._inputs[name].append((args, kwargs))
                        return None
                    return next(calls)

                hooks.before(self._model.get_submodule(name), read, with_kwargs=True)
            torch.manual_seed(2)  # the same dropout
            self._model(input_ids=IDS)


def _uncapped(logits: np.ndarray, softcap: float | None) -> np.ndarray:
    return logits if softcap is None else softcap * np.arctanh(logits / softcap)


@contextmanager
def _watched(model: nn.Module) -> Iterator[HeadMonitor]:
    with HeadMonitor(model, 1, statistics=["max_logit"]) as monitor:
        yield monitor


@pytest.mark.parametrize("name", zoo.each(_FEW, REFUSED))
def test_heads_come_down_to_the_bar_by_their_own_factors(name: str) -> None:
    model = _training(name)
    softcap = getattr(model.config, "attn_logit_softcapping", None)
    weights = {key: x.clone() for key, x in model.state_dict().items()}
    with _watched(model) as monitor:
        torch.manual_seed(2)
        model(input_ids=IDS)
        monitor.step()
        bar = float(np.median(_uncapped(monitor.latest.values["max_logit"], softcap)))
        assert bar > 0
        clip = QKClip(monitor, bar)
        assert all(torch.equal(x, weights[key]) for key, x in model.state_dict().items())
        passes = Passes(model, {site.name for site in monitor.latest.sites})
        passes.run()
        monitor.step()
        before = _uncapped(monitor.latest.values["max_logit"], softcap)
        heads = monitor.latest.heads
        report = clip.step()
        passes.run()
        monitor.step()
        after = _uncapped(monitor.latest.values["max_logit"], softcap)
    factors = {clipped.head: clipped.factor for clipped in report.heads}
    assert set(factors) == {head for head, logit in zip(heads, before, strict=True) if logit > bar}
    assert factors
    assert (after <= bar).all()
    applied = np.array([factors.get(head, 1.0) for head in heads])
    if name == "Albert":  # all of its layers share their weights
        applied = np.tile(applied.reshape(2, zoo.HEADS).min(0), 2)
    np.testing.assert_allclose(after, before * applied, rtol=1e-4)
    changed = {key for key, x in model.state_dict().items() if not torch.equal(x, weights[key])}
    assert 0 < len(changed) <= 4 * 2


@pytest.mark.parametrize("name", tiers(["BloomForCausalLM", "Qwen3"], sorted(REFUSED)))
def test_what_cannot_be_clipped_is_refused_by_name(name: str) -> None:
    model = _training(name)
    with _watched(model) as monitor, pytest.raises(UnsupportedError, match=REFUSED[name]):
        QKClip(monitor)
    assert model.training


def test_latent_attention_is_clipped_as_in_kimi_k2() -> None:
    """√factor on what a head alone has, the whole factor on queries of rotated keys, which all
    heads share and which stay."""
    model = _training("DeepseekV3")
    layer = model.model.layers[0].self_attn
    q, k, rope = (
        p.weight.detach().clone()
        for p in (layer.q_b_proj, layer.kv_b_proj, layer.kv_a_proj_with_mqa)
    )
    with HeadMonitor(model, 1, statistics=["max_logit"], layers=[0]) as monitor:
        clip = QKClip(monitor, 1e-3)
        model(input_ids=IDS)
        monitor.step()
        factors = torch.tensor([clipped.factor for clipped in clip.step().heads])
    assert len(factors) == zoo.HEADS
    roots = factors.sqrt()[:, None, None]
    queries, keys = q.view(zoo.HEADS, 6 + 4, -1), k.view(zoo.HEADS, 6 + 5, -1)
    queries = torch.cat([queries[:, :6] * roots, queries[:, 6:] * roots**2], 1)
    keys = torch.cat([keys[:, :6] * roots, keys[:, 6:]], 1)  # the last 5 are values
    torch.testing.assert_close(layer.q_b_proj.weight, queries.view(q.shape))
    torch.testing.assert_close(layer.kv_b_proj.weight, keys.view(k.shape))
    assert torch.equal(layer.kv_a_proj_with_mqa.weight, rope)
