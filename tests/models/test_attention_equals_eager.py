"""Our kernel under its name: what `eager` gives, and causal where `eager` is, or a refusal."""

import inspect
import pkgutil
from typing import Any

import pytest
import torch
import transformers
from architectures import CASES
from architectures.cases import text
from architectures.decoders import CLASSES, TOKENS, VOCABULARY, make_decoder
from torch import Tensor, nn
from transformers import DynamicCache

import headwise as hw
from headwise.errors import HeadwiseError, UnsupportedError
from headwise.models import cache_argument
from headwise.models.attention import set_attention
from headwise.models.attention.huggingface import _transformers
from on_our_kernel import at_any_size as at_any_size

pytestmark = pytest.mark.usefixtures("at_any_size")

_PREFIX = TOKENS // 2
# Sparse layers, compressed keys, sinks of queries, shared keys, masks by name, and a plain one.
_FEW = ("deepseek_v32", "deepseek_v4", "gemma4_text", "glm5_next_text", "inkling2_text", "llama")


def _floats(output: Any) -> list[Tensor]:
    """All tensors of floats in the output of a model."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    parts = output.values() if hasattr(output, "values") else output
    is_nested = isinstance(output, tuple | list) or hasattr(output, "values")
    return [x for part in parts for x in _floats(part)] if is_nested else []


@torch.no_grad()
def _outputs(model: nn.Module, implementation: str, batch: dict[str, Any]) -> list[Tensor]:
    set_attention(model, implementation)
    torch.manual_seed(0)
    return _floats(model(**batch))


def _gap(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, relative to the largest value."""
    gap = (ours - theirs).nan_to_num().abs().max() if ours.numel() else torch.zeros(())
    return float(gap / theirs.nan_to_num().abs().max().clamp(min=1e-9)) if gap else 0.0


@torch.no_grad()
def _in_pieces(model: nn.Module, implementation: str, ids: Tensor) -> Tensor:
    """The logits of a text that is read over a cache: piece by piece, then token by token."""
    set_attention(model, implementation)
    cache = {str(cache_argument(model)): DynamicCache(config=model.config)}
    pieces = ids.split([_PREFIX, TOKENS - _PREFIX - 2, 1, 1], 1)
    return torch.cat([model(piece, **cache)[0] for piece in pieces], 1)


def _wrong(model: nn.Module, *, own_cache: bool = False) -> dict[str, float]:
    """What is not as under `eager` in a decoder of text, and by how much.

    Args:
        own_cache: Whether the model may need a cache of its own kind.
    """
    ids = torch.randint(3, VOCABULARY, (2, TOKENS))
    padded = torch.ones_like(ids)
    padded[1, :5] = 0
    # To keys that the past does not see, which would change nothing if they were hidden.
    other = torch.cat([ids[:, :_PREFIX], ids[:, _PREFIX:].flip(1)], 1)
    batches: dict[str, dict[str, Any]] = {
        "whole": {"input_ids": ids}, "other future": {"input_ids": other},
        "padded": {"input_ids": ids, "attention_mask": padded},
    }  # fmt: skip
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        batches["last"] = {"input_ids": ids, "logits_to_keep": 3}
    eager, ours = (
        {name: _outputs(model, by, batch)[0] for name, batch in batches.items()}
        for by in ("eager", "headwise")
    )
    real = padded.bool()
    eager["padded"], ours["padded"] = eager["padded"][real], ours["padded"][real]
    gaps = {name: _gap(ours[name], eager[name]) for name in batches}
    moved, moved_eager = (
        _gap(x["other future"][:, :_PREFIX], x["whole"][:, :_PREFIX]) for x in (ours, eager)
    )
    gaps["the future moves the past"] = moved if moved_eager < 1e-6 else 0.0
    if cache_argument(model) and getattr(model.config, "is_decoder", True):
        try:
            in_pieces = _in_pieces(model, "eager", ids)
        except (AttributeError, RuntimeError, TypeError, ValueError):
            assert own_cache  # the model does not take a cache that was made for any decoder
        else:
            gaps["in pieces"] = _gap(_in_pieces(model, "headwise", ids), in_pieces)
    return {name: gap for name, gap in gaps.items() if not gap <= 1e-5}


@pytest.mark.parametrize("model_type", _FEW)
def test_a_decoder_is_as_under_eager(model_type: str) -> None:
    model = make_decoder(model_type)
    assert model is not None
    assert _wrong(model) == {}


@pytest.mark.full
def test_every_decoder_is_as_under_eager_or_refused() -> None:
    wrong, refused, n_right = {}, {}, 0
    for model_type in sorted(CLASSES):
        model = make_decoder(model_type)
        if model is None:
            continue
        try:
            _outputs(model, "eager", {"input_ids": torch.full((1, TOKENS), 5)})
        except HeadwiseError:  # does not call its attention through the interface
            with pytest.raises(HeadwiseError):
                set_attention(model, "headwise")
            continue
        except (RuntimeError, ValueError):  # does not run at these sizes, or needs more inputs
            continue
        try:
            gaps = _wrong(model, own_cache=True)
        except HeadwiseError as error:
            refused[model_type] = str(error)
            continue
        wrong |= {model_type: gaps} if gaps else {}
        n_right += not gaps
    assert wrong == {}
    assert refused.keys() == {"minimax_m3_vl_text"}
    assert n_right >= 110


_CASES = [
    name
    if name in ("AltCLIPModel", "SplinterModel")
    else pytest.param(name, marks=pytest.mark.full)
    for name in CASES
]


@pytest.mark.parametrize("name", _CASES)
def test_every_architecture_is_as_under_eager_or_refused(name: str) -> None:
    model, batch = CASES[name].make()
    if CASES[name].inputs is text:
        batch = {"input_ids": torch.randint(5, 23, (2, 37))}
    try:
        theirs = _outputs(model, "eager", batch)
    except HeadwiseError:  # does not call its attention through the interface
        with pytest.raises(HeadwiseError):
            set_attention(model, "headwise")
        return
    ours = _outputs(model, "headwise", batch)
    assert len(ours) == len(theirs) > 0
    assert max(map(_gap, ours, theirs)) <= 1e-5


def test_a_layer_that_selects_blocks_is_refused() -> None:
    model = make_decoder("minimax_m3_vl_text")
    assert model is not None
    with pytest.raises(UnsupportedError, match=r"MiniMaxM3VLAttention passes block_indices.*sdpa"):
        _outputs(model, "headwise", {"input_ids": torch.full((1, 5), 7)})


@pytest.mark.full
def test_every_model_that_chooses_by_name_is_known() -> None:
    found = set()
    for package in pkgutil.iter_modules(transformers.models.__path__):
        folder = f"{transformers.models.__path__[0]}/{package.name}"
        try:
            with open(f"{folder}/modeling_{package.name}.py", encoding="utf-8") as file:
                found |= {package.name} if _transformers._CHOICE.search(file.read()) else set()
        except FileNotFoundError:  # tokenizers alone
            continue
    assert len(found) > 5
    assert found - {"falcon"} <= _transformers.KNOWN_CHOICES.keys()  # Falcon calls no interface


@pytest.mark.parametrize("implementation", ["eager", "headwise"])
@pytest.mark.parametrize("model_type", ["deepseek_v32", "inkling2_text"])
def test_a_watch_sees_what_is_selected(model_type: str, implementation: str) -> None:
    model, ids = make_decoder(model_type), torch.randint(3, VOCABULARY, (1, TOKENS))
    assert model is not None
    set_attention(model, "eager")
    with torch.no_grad():
        weights = model(ids, output_attentions=True).attentions[0][0]
    set_attention(model, implementation)
    with torch.no_grad(), hw.observe(model, layers=[0]) as watch:
        model(ids, attention_mask=torch.ones_like(ids))
    entropy = -(weights * weights.clamp(min=1e-30).log()).sum(-1)[:, 1:].mean(-1)
    ours = torch.tensor(watch.table().mean("entropy"), dtype=torch.float32)
    torch.testing.assert_close(ours, entropy, rtol=1e-4, atol=1e-5)
