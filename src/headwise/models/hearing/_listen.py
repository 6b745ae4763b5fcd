"""Hear every attention call of a model while a block runs, and leave nothing behind."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headwise.kernels import AttendOutput
from headwise.layer import HeadAttention, MultiHeadAttention
from headwise.models.hearing._call import Call, Hear
from headwise.models.hearing._running import Running
from headwise.models.hearing._softmax import Softmaxes
from headwise.models.hearing._torch import FunctionListener, ordinary_path, tell_torch_layer


@contextmanager
def listen(model: nn.Module, hear: Hear) -> Iterator[None]:
    """Tell `hear` of each attention call of `model`, after the model has computed it itself.

    The model's answer is passed on untouched. Heard are layers of this library, every Hugging
    Face model that goes through the attention interface, `nn.MultiheadAttention`, and modules
    that call `scaled_dot_product_attention` themselves.
    """
    running = Running()
    softmaxes = Softmaxes(running)
    with ExitStack() as stack:
        for module in model.modules():
            for kind, tell in ((HeadAttention, _tell), (nn.MultiheadAttention, tell_torch_layer)):
                if isinstance(module, kind):
                    told = partial(tell, hear)
                    handle = module.register_forward_hook(told, with_kwargs=True)
                    stack.callback(handle.remove)
        for parent in model.modules():
            if isinstance(parent, MultiHeadAttention):
                handle = parent.register_forward_pre_hook(_note_cross, with_kwargs=True)
                stack.callback(parent.attention.__dict__.pop, _CROSS, None)
                stack.callback(handle.remove)
        # A model of Hugging Face has imported transformers already; nobody else pays for it.
        if "transformers" in sys.modules:
            from headwise.models.hearing._huggingface import listen_to_interface

            stack.enter_context(listen_to_interface(model, hear, running))
        stack.enter_context(running.follow(model, (HeadAttention, nn.MultiheadAttention)))
        over = model.register_forward_hook(lambda *_: softmaxes.forget(), always_call=True)
        stack.callback(over.remove)
        stack.enter_context(ordinary_path(model))
        stack.enter_context(FunctionListener(hear, running, softmaxes))
        yield


_CROSS = "_headwise_cross"


def _note_cross(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The core cannot tell self- from cross-attention; its layer can."""
    query = args[0] if args else kwargs["query"]
    key = args[1] if len(args) > 1 else kwargs.get("key")
    module.attention.__dict__[_CROSS] = key is not None and key is not query


@torch.no_grad()
def _tell(
    hear: Hear,
    module: HeadAttention,
    args: tuple[Tensor, Tensor, Tensor],
    kwargs: dict[str, Any],
    output: Tensor | AttendOutput,
) -> None:
    q, k, v = (x.detach() for x in args)
    asked = {name: kwargs[name] for name in ("mask", "causal", "bias") if name in kwargs}
    heads = output.heads if isinstance(output, AttendOutput) else output
    hear(
        Call(
            module=module,
            q=q, k=k, v=v,
            rule=module.rule(q, **asked),
            heads=heads.detach(),
            kernel="headwise",
            exact=not (module.training and module.dropout),
            cross=module.__dict__.get(_CROSS, False),
        )
    )  # fmt: skip
