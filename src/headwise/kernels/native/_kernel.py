"""The native kernel's side of the contract, and when it is faster than torch's."""

import torch
from torch import Tensor

from headwise._native_library import library
from headwise._torch_private import (
    can_read,
    constant_when_traced,
    is_fake,
    is_plain,
    is_traced,
    needs_gradient,
)
from headwise.kernels import cpu
from headwise.kernels._contract import (
    PACKED,
    AttentionKernel,
    AttentionProblem,
    ComputeHeads,
    KernelChoice,
    Named,
    RowRequest,
    RowStatistics,
    why_no_gradients_or_dropout,
)
from headwise.kernels._rule import TensorBias, lower, why_not_lowered
from headwise.kernels.native._autograd import attend_native
from headwise.kernels.native._problem import DTYPES, compute_statistics, prepare_heads
from headwise.masks.parts import Dense

# Multiplications of q · k per thread, as powers of two, from which the kernel saves more than
# its call from Python costs. Half precision gains sooner: torch is slower in it.
LEAST_PRODUCTS, LEAST_PRODUCTS_HALF = 20, 19
# The factor by which that is larger in training, as a power of two.
MORE_IN_TRAINING = 2
# Fewer queries would leave most lanes of a vector empty, unless heads are packed: then it is faster
# for any number of keys.
LEAST_QUERIES = 8
# Queries of a head up to which the heads of a group fill the lanes of a vector better.
FEW = 8
# Queries of the heads that share a kv head up to which bfloat16 without tiles beats torch's
# kernel with AMX, whose tiles multiply 16 of them at once.
MOST_ROWS_BESIDE_AMX = 8
# Numbers of a head that fill the row of a tile.
TILE_DEPTH = 32
# Tokens up to which it gains in training with AMX: its backward pass multiplies logits alone in
# tiles, and that of torch is slow only in short texts.
MOST_TRAINED_IN_TILES = 192


class NativeKernel(AttentionKernel):
    """One pass in C++ on a CPU, where it was built."""

    name = "native"
    guards_nonfinite = True

    @property
    def label(self) -> str:
        return f"native ({library().name})"

    def why_not(self, problem: AttentionProblem, request: RowRequest | None = None) -> str | None:
        q, k, v, rule, *_ = problem
        T, S = q.shape[2], k.shape[2]
        why = _why_no_library()
        if why is None and request is None:
            why = why_no_gradients_or_dropout(problem)
        if why is not None:
            return why
        if q.dtype not in DTYPES or not (q.dtype == k.dtype == v.dtype):
            return f"it does not compute in {q.dtype}"
        if not (_takes(q) and _takes(k) and _takes(v)):
            return "these are not plain tensors on a CPU"
        # Statistics have no operator, so tensors must have values.
        if request is not None and not can_read(q, k, v, *rule.sample(T, S)):
            return "queries, keys, a mask, bias or sink are mapped over, or traced"
        return why_not_lowered(rule, T, S)

    def is_preferred(self, problem: AttentionProblem, request: RowRequest | None = None) -> bool:
        rule = problem.rule
        has_tensor = isinstance(rule.visible, Dense) or isinstance(rule.bias, TensorBias)
        return request is not None or is_faster(problem.q, problem.k, has_tensor)

    def plan(self, problem: AttentionProblem, reason: str) -> KernelChoice:
        q, k, v, rule, *_ = problem
        packed = q.shape[1] != k.shape[1] and is_packed(q.shape[2], q, k, v, rule.sinks)
        reason = f"{reason}; {PACKED}" if packed else reason
        return super().plan(problem, reason)._replace(packed=packed)

    def attend(self, problem: AttentionProblem, choice: KernelChoice) -> Named:
        return attend_native(problem, is_packed(problem.q.shape[2]))

    def prepare(self, problem: AttentionProblem, choice: KernelChoice) -> ComputeHeads | None:
        q, k, v, rule, *_ = problem
        if needs_gradient(q, k, v):
            return None
        lowered = lower(rule, q.shape[2], k.shape[2])
        return prepare_heads(q, k, v, lowered, is_packed(q.shape[2]), rule.visible is not None)

    def statistics(self, problem: AttentionProblem, request: RowRequest) -> RowStatistics:
        # What keys receive is summed over tiles of queries of one head.
        packed = request.received is None and is_packed(problem.q.shape[2], *problem[:3])
        return compute_statistics(problem, request, packed)


@constant_when_traced
def _why_no_library() -> str | None:
    return None if library() else library().why


def _takes(x: Tensor) -> bool:
    """Whether the kernel takes such a tensor, as an operator where it is traced."""
    if torch.compiler.is_compiling() or is_fake(x):
        return x.device.type == "cpu"
    return x.is_cpu and is_plain(x)


def is_packed(n_queries: int, *inputs: Tensor | None) -> bool:
    """Whether the few queries of all heads of a group are packed, so that keys are read once.

    Not in training, where the backward pass must recompute the same logits to the last bit; nor
    while being traced, since an operator does not know whether it is trained.
    """
    if torch.compiler.is_compiling() or not 0 < n_queries <= FEW:
        return False
    tensors = [x for x in inputs if x is not None]
    return can_read(*tensors) and not (is_traced() or needs_gradient(*tensors))


def is_faster(q: Tensor, k: Tensor, has_tensor: bool = False) -> bool:
    """Whether the native kernel is faster than torch's, if it can compute this.

    Args:
        has_tensor: Whether its mask or bias is a tensor. With AMX reading one takes longer than all
            products, and torch's kernel reads it in half the time.
    """
    # An exported program is for other places, where the native kernel may not be.
    if torch.compiler.is_exporting() or q.dtype == torch.float64:
        return False
    (B, H, T, D), n_keys = q.shape, k.shape[2]
    packed = is_packed(T, q, k)
    rows_of_kv_head, trained = T * H // k.shape[1], needs_gradient(q, k)
    tiles = _torch_multiplies_tiles(q)
    if packed:
        return not tiles or rows_of_kv_head <= MOST_ROWS_BESIDE_AMX
    if tiles and (has_tensor or library().name != "amx" or D % TILE_DEPTH):
        return False
    if tiles and trained and max(T, n_keys) > MOST_TRAINED_IN_TILES:
        return False
    least = LEAST_PRODUCTS if tiles or q.dtype == torch.float32 else LEAST_PRODUCTS_HALF
    least += MORE_IN_TRAINING if trained else 0
    return T >= LEAST_QUERIES and B * H * T * n_keys * D >= _n_threads() << least


def native_is_faster(q: Tensor, k: Tensor, has_tensor: bool = False) -> bool:
    """Whether it is faster even than torch's function by itself, if it can compute this."""
    if torch.compiler.is_exporting():  # which would fix the number of keys
        return False
    # In float32, and in bfloat16 with AMX, torch's kernel is nearly as fast on few keys, and its
    # function takes less time in Python.
    few = q.numel() * k.shape[2] < _n_threads() << LEAST_PRODUCTS
    if few and (q.dtype == torch.float32 or _torch_multiplies_tiles(q)):
        return False
    return is_faster(q, k, has_tensor)


def _torch_multiplies_tiles(q: Tensor) -> bool:
    """Whether torch's kernel multiplies these with AMX."""
    return cpu.HAS_AMX and q.dtype == torch.bfloat16


@constant_when_traced
def _n_threads() -> int:
    return torch.get_num_threads()


NATIVE = NativeKernel()
