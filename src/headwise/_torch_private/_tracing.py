"""What may be done to a tensor while it is traced, mapped over or differentiated."""

import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

Function = TypeVar("Function", bound=Callable[..., Any])
# Whose numbers lie in memory: other classes may keep them elsewhere.
PLAIN = frozenset((Tensor, torch.nn.Parameter, torch.nn.Buffer))

try:  # there is no public name
    from torch._subclasses.fake_tensor import FakeTensor
except ImportError:

    class FakeTensor(Tensor):  # type: ignore[no-redef]
        """Stands in where torch has moved its own: no tensor is one."""


def can_read(*tensors: Tensor) -> bool:
    """Whether reading values is cheap and allowed: on a CPU, and not while being traced.

    Reading makes a GPU wait, breaks a compiled graph, and is impossible inside `vmap` or for fake
    tensors. Where it is not allowed, both sides of a decision are computed, to the same result.
    """
    if torch.compiler.is_compiling():
        return False
    # This runs at every call, and a generator would take as long as the checks.
    return not [x for x in tensors if not x.is_cpu or isinstance(x, FakeTensor) or is_wrapped(x)]


def is_fake(x: Tensor) -> bool:
    """Whether a tensor has a shape and a device, but no values."""
    return isinstance(x, FakeTensor)


def is_wrapped(x: Tensor) -> bool:
    """Whether a tensor stands for others: inside `torch.func`, or in batched gradients."""
    transforms = torch._C._functorch
    return transforms.is_functorch_wrapped_tensor(x) or transforms.is_legacy_batchedtensor(x)


def is_traced() -> bool:
    """Whether a tracer that lets values be read records what PyTorch computes."""
    # The public predicate of `torch.jit` has no types; for dispatch modes there is none.
    return torch._C._is_tracing() or torch._C._len_torch_dispatch_stack() > 0


def is_materialized(*tensors: Tensor) -> bool:
    """Whether the values of tensors lie in the memory of some device: not traced, not mapped."""
    if torch.compiler.is_compiling() or is_traced():
        return False
    return not [x for x in tensors if not is_plain(x) or is_wrapped(x)]


def is_plain(x: Tensor) -> bool:
    """Whether a tensor is stored in memory according to its strides."""
    return type(x) in PLAIN and x.layout == torch.strided and not x.is_neg()


def is_eager(*tensors: Tensor) -> bool:
    """Whether these are plain tensors in memory that nothing but the usual autograd follows."""
    if torch.compiler.is_compiling() or is_traced() or in_forward_gradient():
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    try:
        for x in tensors:
            if type(x) not in PLAIN or x.is_neg() or not x.data_ptr():
                return False
    except RuntimeError:  # it has no memory of its own: it is mapped over, or not strided
        return False
    return True


def has_readable_values(x: Tensor) -> bool:
    """Whether the values of a tensor can be read, even if a GPU has to be waited for."""
    if x.device.type != "cuda":
        return can_read(x)
    return is_materialized(x) and not torch.cuda.is_current_stream_capturing()


def needs_gradient(*inputs: Tensor) -> bool:
    """Whether autograd records what is computed from these tensors."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in inputs)


def statically(condition: bool) -> bool:
    """Whether a condition on sizes holds; while being traced, whether it does for every size.

    Deciding by a dynamic size would fix it: the graph would then be for that size alone.
    """
    if not torch.compiler.is_compiling():
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # imports sympy

    return statically_known_true(condition)


def constant_when_traced(function: Function) -> Function:
    """Mark a function that a compiler calls once, when it traces, and whose result it keeps."""
    # As `torch.compiler.assume_constant_result` does, which imports the compiler.
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_when_traced
def in_func_gradient() -> bool:
    """Whether `torch.func` is differentiating anything, these tensors or others."""
    layers = torch._C._functorch.get_interpreter_stack() or []
    return any(layer.key() != torch._C._functorch.TransformType.Vmap for layer in layers)


def in_forward_gradient() -> bool:
    """Whether forward-mode gradients are being computed."""
    return getattr(forward_ad, "_current_level", -1) >= 0


def is_under_func_gradient(*tensors: Tensor) -> bool:
    """Whether `torch.func` differentiates these tensors, so that nothing can be computed again."""
    # No compiler follows the private predicate.
    is_tracked = torch._C._functorch.is_gradtrackingtensor
    return not torch.compiler.is_compiling() and any(is_tracked(x) for x in tensors)


def mapped_with(x: Tensor, others: Iterable[Tensor]) -> Tensor:
    """The same values, mapped over as well if `vmap` maps over the others."""
    # No compiler follows the private predicate.
    if torch.compiler.is_compiling():
        return x
    for other in others:
        if torch._C._functorch.is_batchedtensor(other):
            x = x + torch.zeros_like(other, dtype=x.dtype).sum()
    return x


def in_backward() -> bool:
    """Whether autograd is running a backward pass in this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


def in_func_transform() -> bool:
    """Whether any transform of `torch.func` is running, which keeps state of this thread."""
    return bool(torch._C._functorch.get_interpreter_stack())


def version_of(x: Tensor) -> int:
    """How often a tensor has been changed in place."""
    return int(x._version)


def is_compiler_loaded() -> bool:
    """Whether this process has imported the compiler, without which nothing is compiled."""
    return "torch._dynamo" in sys.modules
