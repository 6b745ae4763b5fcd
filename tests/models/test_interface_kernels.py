"""Implementations without a full mask argument: flash kernels and flex attention."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import transformers.modeling_flash_attention_utils as flash
import zoo
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.masking_utils import flash_attention_mask

from headwise import reference
from headwise.tables import HeadTable
from headwise.watch import Request, observe
from oracles import padded
from tiers import crossed

TEXTS = [[5, 9, 7, 3, 11, 8, 2], [4, 6], [10, 3, 3, 12, 9]]
REQUEST = Request(statistics=(*Request().statistics, "participation"), per_text=True)


def _attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, **options: Any) -> Tensor:
    """One text, `T H D`, in the layout of flash kernels."""
    left, right = (None if side < 0 else side for side in options["window_size"])
    heads = reference.attention(
        *(x.transpose(0, 1)[None].numpy() for x in (q, k, v)),
        causal=causal, window=(left, right), scale=scale, softcap=options["softcap"] or None,
    )  # fmt: skip
    return torch.from_numpy(heads)[0].transpose(0, 1).to(q)


def _flash(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, softmax_scale: float = 1.0,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, dropout_p: float = 0.0,
) -> Tensor:  # fmt: skip
    options = {"window_size": window_size, "softcap": softcap}
    return torch.stack(
        [_attend(*text, causal, softmax_scale, **options) for text in zip(q, k, v, strict=True)]
    )


def _flash_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: Any = None, max_seqlen_k: Any = None, causal: bool = False,
    softmax_scale: float = 1.0, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    dropout_p: float = 0.0,
) -> Tensor:  # fmt: skip
    options = {"window_size": window_size, "softcap": softcap}
    ends = [item.tolist()[1:-1] for item in (cu_seqlens_q, cu_seqlens_k)]
    parts = [torch.tensor_split(x, end) for x, end in zip((q, k, v), (*ends, ends[1]), strict=True)]
    return torch.cat(
        [_attend(*item, causal, softmax_scale, **options) for item in zip(*parts, strict=True)]
    )


@pytest.fixture
def flash_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """What Hugging Face does around flash kernels, which themselves need a GPU."""
    kernels = (_flash, _flash_varlen, None, flash._pad_input, flash._unpad_input)
    monkeypatch.setattr(flash, "_lazy_imports", lambda *_, **__: kernels)
    monkeypatch.setattr(flash, "_loaded_implementation", None)
    name = "flash_written_out"
    for interface, implementation in (
        (AttentionInterface, flash_attention_forward),
        (AttentionMaskInterface, flash_attention_mask),
    ):
        monkeypatch.setitem(interface._global_mapping, name, implementation)
    return name


def _watched(model: nn.Module, batches: list[dict[str, Tensor]]) -> HeadTable:
    with torch.no_grad(), observe(model, REQUEST) as watch:
        for batch in batches:
            model(**batch)
    return watch.table()


def _padded(side: str) -> dict[str, Tensor]:
    batch = padded(TEXTS, side)
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


def _same(ours: HeadTable, known: HeadTable, rtol: float = 1e-6) -> None:
    for name in known.statistics:
        for actual, expected in zip(
            ours.per_text(name).parts, known.per_text(name).parts, strict=True
        ):
            np.testing.assert_allclose(actual, expected, rtol=rtol, atol=rtol, err_msg=name)


each_model_and_side = pytest.mark.parametrize(
    ("name", "side"), crossed(["Llama", "Mistral", "Gemma2", "Bert"], ["left", "right"])
)


@each_model_and_side
def test_flash_kernels_are_understood_with_padding(name: str, side: str, flash_on_cpu: str) -> None:
    model = zoo.make(name)  # Gemma2's own softmax has no room for the masks of float64
    known = _watched(model, [_padded(side)])
    model.set_attn_implementation(flash_on_cpu)
    _same(_watched(model, [_padded(side)]), known, rtol=1e-4)


@pytest.mark.parametrize("boundaries", ["positions", "lengths"])
@pytest.mark.parametrize("name", ["Llama", "Mistral"])
def test_flash_kernels_keep_packed_texts_apart(
    name: str, boundaries: str, flash_on_cpu: str
) -> None:
    model = zoo.make(name).double()
    known = _watched(model, [{"input_ids": torch.tensor([text])} for text in TEXTS])
    model.set_attn_implementation(flash_on_cpu)
    batch: dict[str, Any] = {
        "input_ids": torch.tensor([[token for text in TEXTS for token in text]]),
        "position_ids": torch.cat([torch.arange(len(text)) for text in TEXTS])[None],
        "use_cache": False,
    }
    if boundaries == "lengths":
        lengths = torch.tensor([0, *map(len, TEXTS)])
        ends = lengths.cumsum(0).int()
        batch |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
        batch |= {"max_length_q": int(lengths.max()), "max_length_k": int(lengths.max())}
    _same(_watched(model, [batch]), known)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_flash_kernels_are_understood_while_generating(cache: str, flash_on_cpu: str) -> None:
    model = zoo.make("Mistral").double()
    options = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": cache}
    tables = []
    for kernel in ("sdpa", flash_on_cpu):
        model.set_attn_implementation(kernel)
        with torch.no_grad(), observe(model, REQUEST) as watch:
            model.generate(**_padded("left"), **options, disable_compile=True)
        tables.append(watch.table())
    _same(tables[1], tables[0])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised by Hugging Face's call of torch
@pytest.mark.filterwarnings("ignore:flex_attention called without")  # compiling takes a minute
@each_model_and_side
def test_flex_attention_is_understood(name: str, side: str) -> None:
    model = zoo.make(name)
    known = _watched(model, [_padded(side)])
    model.set_attn_implementation("flex_attention")
    with torch.compiler.set_stance("force_eager"):
        _same(_watched(model, [_padded(side)]), known, rtol=1e-4)
