"""Capture every attention call of a model while a block runs, and restore the model after it."""

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headwise.capture._attention_modules import HOOKED, is_attention
from headwise.capture._call import Answer, AttentionCall, OnCall, OnRepeat
from headwise.capture._capture import Capture, Receiver
from headwise.capture._follow_graphs import call_of_layer
from headwise.capture._functions import capture_functions
from headwise.capture._torch_calls import capture_torch_layer
from headwise.errors import UnsupportedError
from headwise.kernels import AttendOutput
from headwise.layer import HeadAttention
from headwise.models import Hooks, clear_leftovers, ordinary_path


@contextmanager
def open_capture(
    capture: Capture,
    on_call: OnCall,
    answer: Answer | None = None,
    *,
    answers_others: bool = True,
    keep_graph: bool = False,
    compiled: bool = False,
    on_repeat: OnRepeat | None = None,
) -> Iterator[Capture]:
    """Capture while a block runs, as `capture_calls` does.

    Args:
        answer: Computes heads in place of a fused kernel, where that is possible: without
            gradients, dropout or a compiler. The model continues with these heads.
        answers_others: Whether `answer` may replace kernels that are not ours; its heads are
            equal to those of ours to the last bit.
        compiled: Whether compiled code may run, of which `follow_graphs` captures the calls.
        on_repeat: Takes a call by its queries and keys, where that is all it needs.
    """
    receiver = Receiver(on_call, answer, answers_others, keep_graph, on_repeat)
    clear_leftovers(capture.model.modules())
    try:
        with Hooks(compiled=compiled) as hooks:
            capture.open(receiver)
            for module in capture.model.modules():
                if is_attention(module) and id(module) not in capture.uncaptured.called:
                    hooks.once(module, capture.uncaptured.note_called)
                if isinstance(module, HOOKED):
                    is_ours = isinstance(module, HeadAttention)
                    receive = _capture_layer if is_ours else capture_torch_layer
                    hooks.after(module, partial(receive, capture), with_kwargs=True)
            hooks.enter_context(_interface_of(capture))
            hooks.enter_context(ordinary_path(capture.model))
            functions = hooks.enter_context(capture_functions(capture))
            begin = partial(capture.begin, functions.begin_pass)
            hooks.before(capture.model, begin, with_kwargs=True)
            end = partial(capture.end, functions.end_pass)
            hooks.after(capture.model, end, always_call=True)
            yield capture
    finally:
        # The hooks have closed it, unless an interrupt came just then.
        capture.close()


def _interface_of(capture: Capture) -> AbstractContextManager[None]:
    """What captures calls through the attention interface of transformers, if there may be any.

    Raises:
        UnsupportedError: the model is of transformers, whose version has another interface.
    """
    # A Hugging Face model has imported transformers already; other models need not wait.
    if "transformers" not in sys.modules:
        return nullcontext()
    try:
        from headwise.capture._interface import capture_interface
    except ImportError as error:
        classes = {cls for module in capture.model.modules() for cls in type(module).__mro__}
        if not any(cls.__module__.split(".")[0] == "transformers" for cls in classes):
            return nullcontext()
        raise UnsupportedError(
            f"observe: {type(capture.model).__name__} is of a version of transformers with another "
            f"attention interface ({error}). Install transformers 5.1 or later."
        ) from error
    return capture_interface(capture)


@contextmanager
def capture_calls(
    model: nn.Module, on_call: OnCall, *, keep_graph: bool = False
) -> Iterator[Capture]:
    """Call `on_call` with each attention call of `model`, after the model has computed it.

    The output of the model is unchanged. It captures layers of this library, every Hugging
    Face model, `nn.MultiheadAttention`, and modules that call `scaled_dot_product_attention`
    or implement softmax attention by hand: the latter if the first pass does so.

    Args:
        keep_graph: Whether captured tensors stay attached to the autograd graph, so that
            gradients reach the weights they were computed from.
    Yields:
        The capture, which knows the sites of calls, and what was not captured.
    """
    capture = Capture(model)
    with open_capture(capture, on_call, keep_graph=keep_graph):
        yield capture


@torch.no_grad()
def _capture_layer(
    capture: Capture,
    module: HeadAttention,
    args: tuple[Tensor, Tensor, Tensor],
    kwargs: dict[str, Any],
    output: Tensor | AttendOutput,
) -> None:
    """Capture a call of this library's own layer."""
    if not capture.is_active:
        return
    q, k, v, heads = capture.detach(
        *args, output.heads if isinstance(output, AttendOutput) else output
    )
    options = {name: kwargs[name] for name in ("mask", "causal", "bias") if name in kwargs}
    mask, bias = kwargs.get("mask"), kwargs.get("bias")
    fits_graph = bias is None and isinstance(mask, Tensor | None)
    capture.on_call(
        AttentionCall(
            module=module,
            q=q, k=k, v=v,
            rule=module.rule(q, **options),
            heads=heads,
            watched="a hook on the module",
            kernel="headwise",
            exact=not (module.training and module.dropout),
            in_graph=call_of_layer if fits_graph else None,
        )
    )  # fmt: skip
