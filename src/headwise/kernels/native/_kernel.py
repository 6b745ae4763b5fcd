"""The native kernel's side of the contract, and when it is faster than torch's."""

from functools import partial

import torch
from torch import Tensor

from headwise._library import library
from headwise._torch_private import constant_when_traced, needs_gradient
from headwise.kernels.native._compute import (
    build_heads,
    build_statistics,
    is_packed,
    native_statistics,
    why_not_native,
    why_not_native_statistics,
)
from headwise.kernels.native._gradients import attend_native
from headwise.kernels.native._prepared import NativeBuffer, PreparedProblem
from headwise.kernels.spec import (
    OF_MASK,
    AttentionKernel,
    AttentionProblem,
    ComputeHeads,
    ComputeStatistics,
    KernelChoice,
    Named,
    RowRequest,
    RowStatistics,
    SharedRequest,
    SolveHeads,
    StatisticsBuffer,
    TensorBias,
    check_rule,
    cpu,
    lower,
    why_no_gradients_or_dropout,
)
from headwise.masks.parts import Dense

# Multiplications of q · k per thread, as powers of two, from which the kernel saves more than
# its call from Python costs. Half precision gains sooner: torch is slower in it.
LEAST_PRODUCTS, LEAST_PRODUCTS_HALF = 20, 19
# The factor by which that is larger in training, as a power of two.
MORE_IN_TRAINING = 2
# Fewer queries would leave most lanes of a vector empty, unless heads are packed: then it is faster
# for any number of keys.
LEAST_QUERIES = 8
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

    def why_not(self, problem: AttentionProblem) -> str | None:
        return why_no_gradients_or_dropout(problem) or why_not_native(problem)

    def is_preferred(self, problem: AttentionProblem) -> bool:
        rule = problem.rule
        has_tensor = isinstance(rule.visible, Dense) or isinstance(rule.bias, TensorBias)
        return is_faster(problem.q, problem.k, has_tensor)

    def plan(self, problem: AttentionProblem, reason: str) -> KernelChoice:
        q, k, v, rule, *_ = problem
        packed = q.shape[1] != k.shape[1] and is_packed(q.shape[2], q, k, v, rule.sinks)
        form = "none" if rule.visible is None else "blocks"
        reason = f"{reason}; {cpu.PACKED}" if packed else reason
        return KernelChoice(self.name, form, packed, q.dtype != torch.float32, reason)

    def attend(self, problem: AttentionProblem, choice: KernelChoice) -> Named:
        return attend_native(problem)

    def prepare(self, problem: AttentionProblem, choice: KernelChoice) -> SolveHeads:
        q, k, v, rule, _, extras = problem
        if needs_gradient(q, k, v) or not rule.is_static:
            return attend_native
        rows = {"lse": any(extras), "entropy": extras.entropy}
        lowered = lower(rule, q.shape[2], k.shape[2])
        requested = [name for name, is_requested in rows.items() if is_requested]
        prepared = build_heads(q, k, v, lowered, is_packed(q.shape[2]), requested).prepare()
        return attend_native if prepared is None else partial(prepared.heads, attend_native)

    def prepare_heads(
        self, problem: AttentionProblem, choice: KernelChoice, otherwise: ComputeHeads
    ) -> ComputeHeads:
        q, k, v, rule, *_ = problem
        if needs_gradient(q, k, v) or not rule.is_static:
            return otherwise
        lowered = lower(rule, q.shape[2], k.shape[2])
        prepared = build_heads(q, k, v, lowered, is_packed(q.shape[2]), ()).prepare()
        if prepared is None:
            return otherwise
        return prepared.heads_alone(otherwise, q.itemsize, rule.visible is not None)

    def why_no_statistics(
        self, problem: AttentionProblem, request: RowRequest | None
    ) -> str | None:
        return why_not_native_statistics(problem)

    def statistics(self, problem: AttentionProblem, request: RowRequest) -> RowStatistics:
        return native_statistics(problem, request)

    def prepare_statistics(
        self, problem: AttentionProblem, request: RowRequest
    ) -> ComputeStatistics:
        prepared = _prepared_statistics(problem, request)
        if prepared is None:
            return native_statistics
        return partial(prepared.statistics, native_statistics)

    def statistics_buffer(
        self, problem: AttentionProblem, request: SharedRequest, most: int
    ) -> StatisticsBuffer | None:
        has_own = problem.rule.bias is not None or problem.rule.sinks is not None
        prepared = None if request.heads or has_own else _prepared_statistics(problem, request)
        return None if prepared is None else NativeBuffer(prepared, *problem[:2], most)


def _prepared_statistics(problem: AttentionProblem, request: RowRequest) -> PreparedProblem | None:
    """The problem of statistics, prepared for all others of its outline; None if it cannot be."""
    q, k, v, rule, *_ = problem
    # What keys receive is added to zeros, and norms of values belong to one call.
    if request.received is not None or request.key_norms is not None:
        return None
    check_rule(rule, q, k)
    builder, _ = build_statistics(q, k, v if request.heads else v[..., :0], rule, request)
    return builder.prepare(OF_MASK if isinstance(request, SharedRequest) else ())


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
    if tiles and (has_tensor or not _multiplies_tiles(D)):
        return False
    if tiles and trained and max(T, n_keys) > MOST_TRAINED_IN_TILES:
        return False
    least = LEAST_PRODUCTS if tiles or q.dtype == torch.float32 else LEAST_PRODUCTS_HALF
    least += MORE_IN_TRAINING if trained else 0
    return T >= LEAST_QUERIES and B * H * T * n_keys * D >= _n_threads() << least


def is_faster_than_a_call(q: Tensor, k: Tensor, has_tensor: bool = False) -> bool:
    """Whether it is faster even than torch's function by itself, if it can compute this."""
    return not is_shorter_than_a_call(q, k) and is_faster(q, k, has_tensor)


def is_shorter_than_a_call(q: Tensor, k: Tensor) -> bool:
    """Whether this is so little work that torch's function by itself is as fast as any kernel.

    In float32, and in bfloat16 with AMX, a token on few keys is: torch's kernel is nearly as fast
    there, and its function takes less time in Python.
    """
    if q.dtype != torch.float32 and not _torch_multiplies_tiles(q):
        return False
    if torch.compiler.is_exporting():  # which would fix the number of keys
        return False
    return q.numel() * k.shape[2] < _n_threads() << LEAST_PRODUCTS


def _torch_multiplies_tiles(q: Tensor) -> bool:
    """Whether torch's kernel multiplies these with AMX."""
    return cpu.HAS_AMX and q.dtype == torch.bfloat16


def _multiplies_tiles(head_dim: int) -> bool:
    """Whether the native kernel does, for more than a few queries."""
    return library().name == "amx" and head_dim % TILE_DEPTH == 0


@constant_when_traced
def _n_threads() -> int:
    return torch.get_num_threads()


NATIVE = NativeKernel()
