"""Heads and statistics of rows by the kernel in Triton: its task, filled in and solved."""

import importlib.util
import os
from functools import cache

import torch

from headwise._torch_private import is_materialized
from headwise.kernels.spec import (
    AttentionProblem,
    Named,
    RowRequest,
    RowStatistics,
    why_not_lowered,
)
from headwise.kernels.triton._task import (
    Fields,
    add_classes,
    add_distances,
    add_heads,
    add_keys,
    add_output,
    task_of,
)

# Positions are 32-bit numbers.
MOST_TOKENS = 2**31 - 2**10
# Wider heads, or more classes, do not fit next to a multiprocessor.
WIDEST, MOST_CLASSES = 256, 64


@cache
def is_installed() -> bool:
    """Whether Triton is installed; it is imported when it is first needed."""
    return importlib.util.find_spec("triton") is not None


def why_not_triton(problem: AttentionProblem, request: RowRequest | None = None) -> str | None:
    """Why the kernel in Triton cannot compute this; None if it can. Never reads tensor values."""
    q, k, v, rule, *_ = problem
    T, S, widest = q.shape[2], k.shape[2], max(q.shape[3], v.shape[3])
    if not is_installed():
        return "Triton is not installed (pip install 'headwise[triton]')"
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"it does not compute in {q.dtype}"
    if q.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"these tensors are on {q.device}, and TRITON_INTERPRET is not 1"
    if q.device.type != "cuda" and q.dtype == torch.bfloat16:
        return "Triton's interpreter does not multiply bfloat16"
    if not is_materialized(q, k, v, *rule.sample(T, S, q.device)):
        return "these are not plain tensors: some are mapped over, or traced"
    if widest > WIDEST or T + S > MOST_TOKENS:
        return f"it takes widths up to {WIDEST} and {MOST_TOKENS} tokens, not {widest} and {T + S}"
    return why_not_lowered(rule, T, S) or (None if request is None else _why_not_request(request))


def _why_not_request(request: RowRequest) -> str | None:
    """Why these statistics cannot be computed."""
    requested = {"top": request.top, "key_norms": request.key_norms, "received": request.received}
    for name, value in requested.items():
        if value is not None and value is not False:
            return f"it does not compute {name}"
    if request.classes is not None and request.classes.shape[2] > MOST_CLASSES:
        return f"it takes up to {MOST_CLASSES} classes, not {request.classes.shape[2]}"
    return None


@torch.no_grad()
def attend_triton(problem: AttentionProblem) -> Named:
    """The `heads`, their `lse` and `entropy`, without gradients. Masked values have no effect."""
    task = task_of(*problem[:4])
    outputs = add_heads(task, problem.q.dtype) | add_output(
        task, "lse", *(["entropy"] if problem.extras.entropy else [])
    )
    _solve(task)
    return outputs


@torch.no_grad()
def triton_statistics(problem: AttentionProblem, request: RowRequest) -> RowStatistics:
    """Statistics of the weights of every row, and heads in float32, from one pass over the keys."""
    task = task_of(*problem[:4])
    outputs = add_output(task, "n_keys", dtype=torch.int64) | add_output(
        task, "lse", "max_logit", "max_weight"
    )
    requested = {
        "entropy": request.entropy,
        "participation": request.participation,
        "sink": problem.rule.sinks is not None,
    }
    outputs |= add_output(task, *(name for name, is_requested in requested.items() if is_requested))
    if request.argmax:
        outputs |= add_output(task, "argmax", dtype=torch.int64)
    if request.distance:
        outputs |= add_distances(task, request)
    if request.keys is not None:
        outputs |= add_keys(task, request.keys)
    if request.classes is not None:
        outputs |= add_classes(task, request.classes)
    if request.heads:
        outputs |= add_heads(task, torch.float32)
    _solve(task)
    if "key_seen" in outputs:
        outputs["key_seen"] = outputs["key_seen"].view(torch.bool)
    return RowStatistics(**outputs, kernel="triton")


def _solve(task: Fields) -> None:
    from headwise.kernels.triton._launch import launch  # Triton is slow to import

    launch(task)
