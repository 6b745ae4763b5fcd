"""Hear every attention call of a model while a block runs, and leave nothing behind."""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headwise._interrupts import reversible
from headwise.kernels import AttendOutput
from headwise.layer import HeadAttention
from headwise.models._hooks import Hooks
from headwise.models.capture._active_modules import ActiveModules
from headwise.models.capture._call import Answer, AttentionCall, Hear, uncompiled
from headwise.models.capture._softmax import SoftmaxTracker
from headwise.models.capture._torch_calls import capture_functions, ordinary_path, tell_torch_layer


@reversible
def capture_calls(
    model: nn.Module, hear: Hear, answer: Answer | None = None
) -> Iterator[ActiveModules]:
    """Tell `hear` of each attention call of `model`, after the model has computed it itself.

    The model's answer is passed on untouched. Heard are layers of this library, every Hugging
    Face model, `nn.MultiheadAttention`, and modules that call `scaled_dot_product_attention`
    themselves or write the softmax out. What is yielded knows which modules have been called,
    and in which of them a softmax could not be read.

    With `answer`, whose heads are then the model's, the calls are put to it that may be answered
    in place of a fused kernel: without gradients, dropout or a compiler.
    """
    hear = uncompiled(hear)
    running = ActiveModules(answer)
    softmaxes = SoftmaxTracker(running)
    told: dict[type[nn.Module], Callable[..., None]] = {
        HeadAttention: partial(_tell, hear, running),
        nn.MultiheadAttention: partial(tell_torch_layer, hear),
    }
    with Hooks() as hooks:
        for module, tell in _of_kinds(model, told):
            hooks.after(module, tell, with_kwargs=True)
        # A model of Hugging Face has imported transformers already; nobody else pays for it.
        if "transformers" in sys.modules:
            from headwise.models.capture.huggingface import capture_interface

            hooks.enter_context(capture_interface(model, hear, running))
        hooks.enter_context(running.follow(model, tuple(told)))
        hooks.after(model, lambda *_: softmaxes.forget(), always_call=True)
        hooks.enter_context(ordinary_path(model))
        hooks.enter_context(capture_functions(hear, running, softmaxes))
        yield running


def _of_kinds(
    model: nn.Module, told: dict[type[nn.Module], Callable[..., None]]
) -> Iterator[tuple[nn.Module, Callable[..., None]]]:
    for module in model.modules():
        for kind, tell in told.items():
            if isinstance(module, kind):
                yield module, tell


@torch.no_grad()
def _tell(
    hear: Hear,
    running: ActiveModules,
    module: HeadAttention,
    args: tuple[Tensor, Tensor, Tensor],
    kwargs: dict[str, Any],
    output: Tensor | AttendOutput,
) -> None:
    q, k, v = (x.detach() for x in args)
    asked = {name: kwargs[name] for name in ("mask", "causal", "bias") if name in kwargs}
    heads = output.heads if isinstance(output, AttendOutput) else output
    hear(
        AttentionCall(
            module=module,
            q=q, k=k, v=v,
            rule=module.rule(q, **asked),
            heads=heads.detach(),
            watched="a hook on the module",
            kernel="headwise",
            exact=not (module.training and module.dropout),
            # The core cannot tell self- from cross-attention; the layer around it can.
            cross=running.reads_another_text(q.shape[2], k.shape[2]),
        )
    )  # fmt: skip
