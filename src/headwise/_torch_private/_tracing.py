"""What may be done to a tensor while it is traced, mapped over or differentiated."""

from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from headwise._torch_private._names import required

Function = TypeVar("Function", bound=Callable[..., Any])
# Everything about tensors but their values.
Outline = tuple[Hashable, ...]
# Whose numbers lie in memory: other classes may keep them elsewhere.
PLAIN = frozenset((Tensor, torch.nn.Parameter, torch.nn.Buffer))

try:  # there is no public name
    from torch._subclasses.fake_tensor import FakeTensor
except ImportError:

    class FakeTensor(Tensor):  # type: ignore[no-redef]
        """Stands in where torch has moved its own: no tensor is one."""


# Whether a compiler, and no exporter, traces what runs: it must see torch's own function.
is_traced_by_compiler = torch.compiler.is_dynamo_compiling


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
    try:
        transforms = torch._C._functorch
        return transforms.is_functorch_wrapped_tensor(x) or transforms.is_legacy_batchedtensor(x)
    except AttributeError:  # another version of torch; what stands for others has no memory
        try:
            x.data_ptr()
        except RuntimeError:
            return True
        return False


def is_traced() -> bool:
    """Whether a tracer that lets values be read records what PyTorch computes."""
    # The public predicate of `torch.jit` has no types; for dispatch modes there is none.
    try:
        return torch._C._is_tracing() or torch._C._len_torch_dispatch_stack() > 0
    except AttributeError:  # another version of torch: what traced tensors take is slower, and safe
        return True


def is_materialized(*tensors: Tensor) -> bool:
    """Whether the values of tensors lie in the memory of some device: not traced, not mapped."""
    if torch.compiler.is_compiling() or is_traced():
        return False
    return not [x for x in tensors if not is_plain(x) or is_wrapped(x)]


def under_autocast(x: Tensor) -> bool:
    """Whether autocast is on for the device of a tensor; some, such as meta, have none."""
    # Both have it, and torch.compile of torch 2.11 cannot ask whether they do.
    if x.is_cpu:
        return torch.is_autocast_enabled("cpu")
    if x.is_cuda:
        return torch.is_autocast_enabled("cuda")
    kind = x.device.type
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def is_plain(x: Tensor) -> bool:
    """Whether a tensor is stored in memory according to its strides."""
    return type(x) in PLAIN and x.layout == torch.strided and not x.is_neg()


def eager_outline(
    q: Tensor, k: Tensor, v: Tensor, kernel: Callable[[], Hashable], *others: Hashable
) -> Outline | None:
    """What decides how queries, keys and values are computed, but for their values, and `others`.

    None where that may not be remembered: unless all of them are plain tensors, and nothing but the
    usual autograd follows them. It runs at every call: by the functions of this file that ask the
    same it would take 9 µs in place of 3.

    Args:
        kernel: Gives the loaded kernel. A compiler does not ask it, since it would trace it.
    """
    functions = torch._C
    try:
        if (
            torch.compiler.is_dynamo_compiling()
            or functions._is_tracing()
            or functions._len_torch_dispatch_stack()
            or functions._functorch.peek_interpreter_stack() is not None
            or getattr(forward_ad, "_current_level", -1) >= 0
            or functions._is_any_autocast_enabled()
            or not (type(q) in PLAIN and type(k) in PLAIN and type(v) in PLAIN)
            or q.is_neg() or k.is_neg() or v.is_neg()
            or not (q.data_ptr() and k.data_ptr() and v.data_ptr())
        ):  # fmt: skip
            return None
    except (RuntimeError, AttributeError):
        # A tensor is mapped over or not strided; or another version of torch has other names.
        return None
    learns = torch.is_grad_enabled()
    return (
        q.shape, q.stride(), q.dtype, q.is_cpu or q.device, learns and q.requires_grad,
        k.shape, k.stride(), k.dtype, k.is_cpu or k.device, learns and k.requires_grad,
        v.shape, v.stride(), v.dtype, v.is_cpu or v.device, learns and v.requires_grad,
        torch.get_num_threads(), kernel(), others,
    )  # fmt: skip


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
    transforms = torch._C._functorch
    try:
        layers = transforms.get_interpreter_stack() or []
        return any(layer.key() != transforms.TransformType.Vmap for layer in layers)
    except AttributeError:  # another version of torch: kernels without such gradients are left out
        return True


def in_forward_gradient() -> bool:
    """Whether forward-mode gradients are being computed."""
    return getattr(forward_ad, "_current_level", -1) >= 0


def is_under_func_gradient(*tensors: Tensor) -> bool:
    """Whether `torch.func` differentiates these tensors, so that nothing can be computed again."""
    if torch.compiler.is_compiling():  # no compiler follows the private predicate
        return False
    try:
        return any(torch._C._functorch.is_gradtrackingtensor(x) for x in tensors)
    except AttributeError:  # another version of torch: without computing again it takes more memory
        return True


def mapped_with(x: Tensor, others: Iterable[Tensor]) -> Tensor:
    """The same values, mapped over as well if `vmap` maps over the others."""
    # No compiler follows the private predicate.
    if torch.compiler.is_compiling():
        return x
    for other in others:
        if getattr(torch._C._functorch, "is_batchedtensor", is_wrapped)(other):
            x = x + torch.zeros_like(other, dtype=x.dtype).sum()
    return x


def in_backward() -> bool:
    """Whether autograd is running a backward pass in this thread."""
    return bool(required(torch._C, "_current_graph_task_id")() != -1)


def in_func_transform() -> bool:
    """Whether any transform of `torch.func` is running, which keeps state of this thread."""
    return bool(required(torch._C._functorch, "get_interpreter_stack")())


def version_of(x: Tensor) -> int:
    """How often a tensor has been changed in place."""
    return int(x._version)
