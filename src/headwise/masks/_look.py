"""What may be asked of a tensor while it is traced or transformed."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor  # there is no public name

Asked = TypeVar("Asked", bound=Callable[..., Any])


def can_look(*tensors: Tensor) -> bool:
    """Whether looking at numbers is cheap and allowed: in memory, and not while being traced.

    A look makes a GPU wait, breaks a compiled graph, and is impossible inside `vmap` or at fake
    tensors. Where it is not allowed, what would be decided by it is computed in any case, to the
    same result.
    """
    if torch.compiler.is_compiling():
        return False
    # Asked at every call: a generator would take as long as the questions.
    return not [x for x in tensors if not x.is_cpu or isinstance(x, FakeTensor) or is_wrapped(x)]


def is_wrapped(x: Tensor) -> bool:
    """Whether a tensor stands for others: inside `torch.func`, or in batched gradients."""
    # There is no public way to ask, and none that a compiler could follow.
    transforms = torch._C._functorch
    return transforms.is_functorch_wrapped_tensor(x) or transforms.is_legacy_batchedtensor(x)


def is_recorded() -> bool:
    """Whether a tracer that lets numbers be looked at writes down what PyTorch computes."""
    # The public question about `torch.jit` has no types; about modes of dispatch there is none.
    return torch._C._is_tracing() or torch._C._len_torch_dispatch_stack() > 0


def is_there(*tensors: Tensor) -> bool:
    """Whether the numbers of tensors lie in the memory of some device: not traced, not mapped."""
    plain = (Tensor, torch.nn.Parameter, torch.nn.Buffer)
    if torch.compiler.is_compiling() or is_recorded():
        return False
    return all(
        type(x) in plain and x.layout == torch.strided and not (is_wrapped(x) or x.is_neg())
        for x in tensors
    )


def has_values(x: Tensor) -> bool:
    """Whether the numbers of a tensor can be read, be it that a GPU has to be waited for."""
    if x.device.type != "cuda":
        return can_look(x)
    return is_there(x) and not torch.cuda.is_current_stream_capturing()


def is_trained(*inputs: Tensor) -> bool:
    """Whether gradients will be asked for."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in inputs)


def known(condition: bool) -> bool:
    """Whether a condition on sizes holds; while being traced, whether it does for every size.

    Deciding by a size that is still open would settle it: the graph would then be for that size.
    """
    if not torch.compiler.is_compiling():
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # imports sympy

    return statically_known_true(condition)


def settled(ask: Asked) -> Asked:
    """A question that a compiler asks once, when it traces, and whose answer it keeps."""
    # As `torch.compiler.assume_constant_result` does, which imports the compiler.
    ask._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return ask


@settled
def in_func_gradient() -> bool:
    """Whether `torch.func` is differentiating something, be it these tensors or others."""
    # There is no public way to ask.
    layers = torch._C._functorch.get_interpreter_stack() or []
    return any(layer.key() != torch._C._functorch.TransformType.Vmap for layer in layers)


def is_transformed(*tensors: Tensor) -> bool:
    """Whether `torch.func` is differentiating, under which nothing can be computed again."""
    # There is no public way to ask, and none that a compiler follows.
    asked = torch._C._functorch.is_gradtrackingtensor
    return not torch.compiler.is_compiling() and any(asked(x) for x in tensors)


def mapped_with(x: Tensor, others: Iterable[Tensor]) -> Tensor:
    """The same numbers, mapped over as well if `vmap` maps over the others."""
    # There is no public way to ask, and none that a compiler follows.
    if torch.compiler.is_compiling():
        return x
    for other in others:
        if torch._C._functorch.is_batchedtensor(other):
            x = x + torch.zeros_like(other, dtype=x.dtype).sum()
    return x
