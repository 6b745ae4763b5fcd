"""Capture every attention call of a model while a block runs, and restore the model after it."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headwise.kernels import AttendOutput
from headwise.layer import HeadAttention
from headwise.models._hooks import Hooks, clear_leftovers
from headwise.models.capture._active_modules import ActiveModules
from headwise.models.capture._call import Answer, AttentionCall, OnCall
from headwise.models.capture._functions import capture_functions
from headwise.models.capture._interception import Understanding
from headwise.models.capture._torch_calls import capture_torch_layer, ordinary_path
from headwise.models.capture.softmax import SoftmaxTracker


@contextmanager
def capture_calls(
    model: nn.Module,
    on_call: OnCall,
    answer: Answer | None = None,
    *,
    answers_others: bool = True,
    keep_graph: bool = False,
    understanding: Understanding | None = None,
) -> Iterator[ActiveModules]:
    """Call `on_call` with each attention call of `model`, after the model has computed it.

    The output of the model is unchanged. It captures layers of this library, every Hugging
    Face model, `nn.MultiheadAttention`, and modules that call `scaled_dot_product_attention`
    or implement softmax attention by hand.

    Args:
        answer: Computes heads in place of a fused kernel, where that is possible: without
            gradients, dropout or a compiler. The model continues with these heads.
        answers_others: Whether `answer` may replace kernels that are not ours; its heads are
            equal to those of ours to the last bit.
        keep_graph: Whether captured tensors stay attached to the autograd graph, so that
            gradients reach the weights they were computed from.
        understanding: What earlier captures of the model have found; None: nothing.
    Yields:
        Which modules are active and were called, and which have a softmax whose product with
        values was not found.
    """
    active = ActiveModules(
        on_call,
        answer,
        answers_others=answers_others,
        keep_graph=keep_graph,
        understanding=understanding,
    )
    softmaxes = SoftmaxTracker(active)
    modules = list(model.modules())
    clear_leftovers(modules)
    hooked: dict[type[nn.Module], Callable[..., None]] = {
        HeadAttention: partial(_capture_layer, active),
        nn.MultiheadAttention: partial(capture_torch_layer, active),
    }
    try:
        with Hooks() as hooks:
            for kind, hook in hooked.items():
                for module in modules:
                    if isinstance(module, kind):
                        hooks.after(module, hook, with_kwargs=True)
            # A Hugging Face model has imported transformers already; other models need not wait.
            if "transformers" in sys.modules:
                from headwise.models.capture.huggingface import capture_interface

                hooks.enter_context(capture_interface(model, active))
            hooks.enter_context(ordinary_path(model))
            functions = hooks.enter_context(capture_functions(active, softmaxes))
            hooks.enter_context(active.follow(model, tuple(hooked), functions))
            yield active
    finally:
        # The hooks have closed it, unless an interrupt came just then.
        active.close()


@torch.no_grad()
def _capture_layer(
    active: ActiveModules,
    module: HeadAttention,
    args: tuple[Tensor, Tensor, Tensor],
    kwargs: dict[str, Any],
    output: Tensor | AttendOutput,
) -> None:
    """Capture a call of this library's own layer."""
    q, k, v = (active.detach(x) for x in args)
    options = {name: kwargs[name] for name in ("mask", "causal", "bias") if name in kwargs}
    heads = output.heads if isinstance(output, AttendOutput) else output
    active.on_call(
        AttentionCall(
            module=module,
            q=q, k=k, v=v,
            rule=module.rule(q, **options),
            heads=active.detach(heads),
            watched="a hook on the module",
            kernel="headwise",
            exact=not (module.training and module.dropout),
        )
    )  # fmt: skip
