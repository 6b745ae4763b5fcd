"""Which token each number of a model's inputs feeds.

While the attention before the tokens gives zero, each token depends on its own pixels alone. A
backward pass of signs for each bit of a token's number writes, in the sign of the gradient of each
number of the inputs, which token it feeds.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from headwise._progress import Progress
from headwise.capture import AttentionCall, capture_calls, find_stacks
from headwise.errors import UnsupportedError
from headwise.models import hooked
from headwise.ownership import call_model

Inputs = Mapping[str, Any]
# Indices into all numbers and the token of each; the texts and the tokens of each; their stack.
Feeds = tuple[Tensor, Tensor, tuple[int, int], str]

BY_HAND = "If you know the regions, make them: headwise.regions.ImageRegions(rows, sizes)."


def pixels_of(inputs: Inputs) -> dict[str, Tensor]:
    """The inputs that may be made of pixels: tensors of floating point."""
    tensors = {name: x for name, x in inputs.items() if isinstance(x, Tensor)}
    return {name: x for name, x in tensors.items() if x.is_floating_point()}


def tokens_of_numbers(model: nn.Module, inputs: Inputs, on_progress: Progress | None) -> Feeds:
    """Which token each number of the inputs feeds.

    Returns:
        Indices into all numbers, and the token of each: a number that feeds two is there twice. The
        number of texts and of tokens in each, and the stack that reads them.
    """
    leaves = {name: x.detach().clone().requires_grad_() for name, x in pixels_of(inputs).items()}
    # Products, since some models write into their inputs.
    hidden, name = _entering(model, lambda: {**inputs, **{n: x * 1 for n, x in leaves.items()}})
    tokens = hidden.reshape(-1, hidden.shape[-1])
    # A plain sum would have no gradient behind a layer norm.
    readout = torch.randn(tokens.shape[-1], generator=torch.Generator().manual_seed(0))
    sums, index = tokens @ readout.to(tokens), torch.arange(len(tokens))

    def gradient(signs: Tensor) -> Tensor:
        wanted, signs = [*leaves.values()], signs.to(sums)
        parts = torch.autograd.grad(sums, wanted, signs, retain_graph=True, allow_unused=True)
        known = [torch.zeros(1) if part is None else part.float().cpu() for part in parts]
        pairs = zip(known, wanted, strict=True)
        return torch.cat([part.expand(x.shape).flatten() for part, x in pairs])

    base = gradient(torch.ones(len(sums))) if sums.requires_grad else torch.zeros(1)
    if not base.any():
        raise UnsupportedError(
            f"image_regions: no token of {name} is made of pixels of its own, as behind a "
            f"resampler, whose queries reach the whole image by attention. {BY_HAND}"
        )
    n_bits = (len(tokens) - 1).bit_length()
    token, shared = torch.zeros(len(base), dtype=torch.int64), torch.zeros(len(base)).bool()
    for bit in range(n_bits):
        signed = gradient(1 - 2 * (index >> bit & 1))
        token |= (signed.sign() != base.sign()).long() << bit
        # A sign alone never changes a size: where it changes, several tokens are fed.
        shared |= ~torch.isclose(signed.abs(), base.abs(), rtol=1e-3, atol=0)
        if on_progress is not None:
            on_progress(bit + 1, n_bits)
    element = torch.nonzero((base != 0) & ~shared).flatten()
    elements, owners = [element], [token[element]]
    for number in index.tolist() if shared.any() else ():  # features that are interpolated
        more = torch.nonzero((gradient(index == number) != 0) & shared).flatten()
        elements, owners = [*elements, more], [*owners, torch.full_like(more, number)]
        if on_progress is not None:
            on_progress(number + 1, len(index))
    n_texts = hidden.shape[0] if hidden.ndim > 2 else 1
    roots = [(f"{root}.", stack) for stack, root in find_stacks(model).items()]
    stacks = [x for root, x in roots if f"{name}.".startswith(root) or root.startswith(f"{name}.")]
    shape = (n_texts, len(tokens) // n_texts)
    return torch.cat(elements), torch.cat(owners), shape, stacks[0] if stacks else ""


def _entering(model: nn.Module, inputs: Callable[[], Inputs]) -> tuple[Tensor, str]:
    """What enters the text decoder (of an encoder, its first layer of attention) while the
    attention before it gives zero; and the name of that module."""
    decoder: nn.Module = getattr(model, "get_decoder", lambda: model)()
    attending: list[tuple[nn.Module, dict[Any, Tensor]]] = []
    entered: list[tuple[nn.Module, dict[Any, Tensor]]] = []

    def on_call(call: AttentionCall) -> None:
        around = call.module_call if call.q.requires_grad else None
        moved = {} if around is None else _moved(around.args, around.kwargs)
        attending.append((call.module, moved))

    def arrive(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if moved := _moved(args, kwargs):
            entered.append((module, moved))
            raise _ReachedError

    first = inputs()
    ids = first.get("input_ids")
    shape = tuple(ids.shape) if isinstance(ids, Tensor) else None
    # Encoders of images call one of their own parts a decoder.
    arrivals = [] if shape is None or decoder is model else [(decoder, arrive)]
    with (
        suppress(_ReachedError),
        hooked(before=arrivals, with_kwargs=True),
        capture_calls(model, on_call, keep_graph=True) as capture,
    ):
        call_model(model, dict(first), "image_regions")
    found = [
        (module, name, tuple(x.shape[:2]) == shape)
        for module, moved in entered or attending
        for name, x in moved.items()
    ]
    found.sort(key=lambda entry: not entry[2])  # stable: the first one of the right shape
    if not found or (entered and not found[0][2]):
        how = "by cross-attention" if found else "by no attention that can be followed"
        raise UnsupportedError(
            f"image_regions: the pixels reach {type(decoder).__name__} {how}, not as tokens of its "
            f"text. {BY_HAND}"
        )
    module, argument, _ = found[0]
    inner = {id(part) for part in module.modules()}
    before = [m for m, _ in attending] + [
        capture.modules[key] for key in capture.uncaptured.unsupported
    ]
    hidden: list[Tensor] = []

    def receive(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden.append(_named(args, kwargs)[argument])
        raise _ReachedError

    def silence(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if isinstance(output, tuple):
            return (torch.zeros_like(output[0]), *output[1:])
        return torch.zeros_like(output)

    with (
        suppress(_ReachedError),
        hooked(before=[(module, receive)], with_kwargs=True),
        hooked(after=[(m, silence) for m in before if id(m) not in inner]),
    ):
        call_model(model, dict(inputs()), "image_regions")
    return hidden[0], next(name for name, m in model.named_modules() if m is module)


class _ReachedError(Exception):
    """The tokens have entered: the rest of the model need not run."""


def _moved(args: tuple[Any, ...], kwargs: Inputs) -> dict[Any, Tensor]:
    """The arguments that depend on the pixels, by their place or name."""
    named = _named(args, kwargs).items()
    return {name: x for name, x in named if isinstance(x, Tensor) and x.requires_grad}


def _named(args: tuple[Any, ...], kwargs: Inputs) -> dict[int | str, Any]:
    return dict(enumerate(args)) | dict(kwargs)
