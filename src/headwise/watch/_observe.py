"""`observe`: watch every head of a model while a block runs."""

import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from numbers import Integral
from typing import Any, SupportsIndex

from torch import nn

from headwise._torch_private import uncompiled_block
from headwise.errors import ArgumentError, UnsupportedError
from headwise.models import check_model
from headwise.shapes import is_size
from headwise.watch._recorder import Recorder
from headwise.watch._request import Request
from headwise.watch._watch import Watch


@uncompiled_block
def observe(
    model: nn.Module,
    request: Request | None = None,
    layers: Collection[SupportsIndex] | None = None,
    every: SupportsIndex = 1,
    exact: bool = True,
) -> Iterator[Watch]:
    """Watch every head of a model while the block runs.

    The model computes its output with its own kernel, and that output is unchanged to the last
    bit. Statistics take a second pass over the same queries and keys, in memory that grows
    linearly with the length of the text. Padding (`attention_mask`) is neither a query, a key
    nor a position. At the first call of each layer, our reconstruction of its heads is checked
    against the model's own output, and a call that differs is refused.

    It watches layers of this library, Hugging Face models, `nn.MultiheadAttention`, and modules
    that call `scaled_dot_product_attention` or implement softmax attention by hand. For the
    latter, the largest logit is known if logits are scaled products with a mask; it is NaN if a
    bias was added, or under `torch.inference_mode()`. `nn.MultiheadAttention` and
    `nn.TransformerEncoder` run outside their private fast path (evaluation without gradients);
    `sites()` says so. Modules are restored when the block ends, also after an exception or an
    interrupt (Ctrl-C). An interrupt that falls into the few lines of entering or leaving the block
    may leave a hook: it does nothing, because its capture is closed (at the latest when Python
    drops the exception), and the next watch of the model removes it. A copy of the model that is
    made or saved inside the block is not watched.

    Args:
        model: Any model with such layers, or a `SentenceTransformer` around one. A compiled
            model, or one within a compiled function, runs uncompiled in its first pass, and in all
            of them if its graphs cannot hand over its calls: they can where one stack attends
            through Hugging Face's interface (`eager` or `sdpa`), by
            `scaled_dot_product_attention` or in this library's layers, without `maps`, `value`,
            `output_norm` and `gate`.
        request: The statistics to compute. None is a `Request()`: those that are cheap and apply
            to any text.
        layers: The layers to watch, counted from 0 in each stack, in the order in which they
            attend. None is all of them.
        every: Watch only every n-th forward pass, beginning with the first. Under gradient
            accumulation each micro-batch is a forward pass.
        exact: False lets the pass that computes the statistics also compute the heads, equal up
            to rounding, which saves the model's own kernel. This applies once the first call of
            a site was verified, in place of a fused kernel called through Hugging Face's
            interface or as `scaled_dot_product_attention`, without gradients or dropout.
            Everywhere else the model's own kernel runs. A compiled graph whose calls are handed
            over has this library's kernel in the passes that `every` leaves out, too. `sites()`
            names the kernel that ran, under `kernel`.
    Yields:
        The watch; its table can be read during the block and after it.
    Raises:
        ArgumentError: `model` is not a model, `every` is below 1, or `layers` are not numbers
            from 0 on.
        UnsupportedError: a call cannot be captured exactly, the model runs in two threads at once,
            or another thread watches it; and by the table, if a compiled graph has not handed over
            every call.

    Example:
        >>> import torch
        >>> from headwise.layer import MultiHeadAttention
        >>> layer = MultiHeadAttention(8, 2)
        >>> with observe(layer) as watch:
        ...     out = layer(torch.randn(1, 5, 8), causal=True)
        >>> [str(head) for head in watch.table().heads]
        ['L0.H0', 'L0.H1']
    """
    inner = check_model("observe", model)
    numbers, every = check_arguments("observe", layers, every)
    if not isinstance(request, Request | None):
        raise ArgumentError(f"observe: request={request!r}. Give a Request(...).")
    with open_watch(Recorder(inner, request or Request(), numbers, every), exact) as watch:
        yield watch


@uncompiled_block
def open_watch(recorder: Recorder, exact: bool = True) -> Iterator[Watch]:
    """The watch of what a recorder records while the block runs."""
    with _in_one_thread(recorder.model), recorder.recording(exact):
        yield Watch(recorder)


# The thread of each open watch, by the identity of its model, which the watch keeps alive.
_THREADS: list[tuple[int, int]] = []


@contextmanager
def _in_one_thread(model: nn.Module) -> Iterator[None]:
    """Refuse a model that another thread watches: a watch hooks the model for all threads."""
    opened = id(model), threading.get_ident()
    if any(watched == opened[0] and thread != opened[1] for watched, thread in _THREADS):
        raise UnsupportedError(
            f"observe: another thread is watching this {type(model).__name__}. Watch a copy in "
            f"each thread (copy.deepcopy), or one after the other."
        )
    _THREADS.append(opened)
    try:
        yield
    finally:
        _THREADS.remove(opened)


def check_arguments(function: str, layers: Any, every: Any = 1) -> tuple[list[int] | None, int]:
    """`layers` and `every`, of Python or NumPy, as whole numbers of Python.

    Raises:
        ArgumentError: they are no whole numbers in range.
    """
    if not is_size(every):
        raise ArgumentError(f"{function}: every={every!r}. Give a whole number, 1 or more.")
    if layers is None:
        return None, int(every)
    are_numbers = isinstance(layers, Collection) and len(layers) > 0
    if not are_numbers or not all(isinstance(n, Integral) and int(n) >= 0 for n in layers):
        raise ArgumentError(f"{function}: layers={layers!r}. Give a list of numbers, from 0 on.")
    return [int(layer) for layer in layers], int(every)
