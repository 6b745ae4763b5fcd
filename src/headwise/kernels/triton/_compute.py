"""What the kernel is asked for: heads, and statistics of rows."""

import importlib.util
import os
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor

from headwise.kernels._request import Named, RowRequest, RowStatistics
from headwise.kernels._rule import Rule
from headwise.kernels._words import cannot_follow
from headwise.kernels.triton._task import (
    Fields,
    ask,
    ask_classes,
    ask_distances,
    ask_heads,
    ask_keys,
    task_of,
)
from headwise.masks import is_there

# Positions are 32-bit numbers.
MOST_TOKENS = 2**31 - 2**10
# Wider heads, or more classes, do not fit next to a multiprocessor.
WIDEST, MOST_CLASSES = 256, 64


class TritonStatistics(RowStatistics):
    """Statistics of every row, told by the kernel in Triton."""

    @property
    def kernel(self) -> str:
        return "triton"


@cache
def is_installed() -> bool:
    """Whether there is a Triton; it is imported when it is first needed."""
    return importlib.util.find_spec("triton") is not None


def cannot(
    q: Tensor, k: Tensor, v: Tensor, rule: Rule, request: RowRequest | None = None
) -> str | None:
    """Why the kernel in Triton does not compute this; None: it does. Of numbers nothing is read."""
    T, S, widest = q.shape[2], k.shape[2], max(q.shape[3], v.shape[3])
    if not is_installed():
        return "Triton is not installed (pip install 'headwise[triton]')"
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"it does not compute in {q.dtype}"
    if q.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"these tensors are on {q.device}, and TRITON_INTERPRET is not 1"
    if q.device.type != "cuda" and q.dtype == torch.bfloat16:
        return "Triton's interpreter does not multiply bfloat16"
    if not is_there(q, k, v, *rule.corner(T, S, q.device)):
        return "these are not plain tensors: some are mapped over, or traced"
    if widest > WIDEST or T + S > MOST_TOKENS:
        return f"it takes widths up to {WIDEST} and {MOST_TOKENS} tokens, not {widest} and {T + S}"
    return cannot_follow(rule, T, S) or (None if request is None else _cannot_tell(request))


def _cannot_tell(request: RowRequest) -> str | None:
    """Why a request is not met."""
    asked = {"top": request.top, "key_norms": request.key_norms, "received": request.received}
    for name, wanted in asked.items():
        if wanted is not None and wanted is not False:
            return f"it does not compute {name}"
    if request.classes is not None and request.classes.shape[2] > MOST_CLASSES:
        return f"it takes up to {MOST_CLASSES} classes, not {request.classes.shape[2]}"
    return None


@torch.no_grad()
def attend_triton(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B Hkv S D"],
    v: Float[Tensor, "B Hkv S Dv"],
    rule: Rule,
    keep_entropy: bool = False,
) -> Named:
    """The `heads`, their `lse` and `entropy`, without gradients. What is hidden reaches nothing."""
    task = task_of(q, k, v, rule)
    found = ask_heads(task, q.dtype) | ask(task, "lse", *(["entropy"] if keep_entropy else []))
    _solve(task)
    return found


@torch.no_grad()
def triton_statistics(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B Hkv S D"],
    v: Float[Tensor, "B Hkv S Dv"],
    rule: Rule,
    request: RowRequest,
) -> RowStatistics:
    """Statistics of the weights of every row, and heads in float32, from one pass over the keys."""
    task = task_of(q, k, v, rule)
    found = ask(task, "n_keys", dtype=torch.int64) | ask(task, "lse", "max_logit", "max_weight")
    asked = {
        "entropy": request.entropy,
        "participation": request.participation,
        "sink": rule.sinks is not None,
    }
    found |= ask(task, *(name for name, wanted in asked.items() if wanted))
    if request.argmax:
        found |= ask(task, "argmax", dtype=torch.int64)
    if request.distance:
        found |= ask_distances(task, request)
    if request.keys is not None:
        found |= ask_keys(task, request.keys)
    if request.classes is not None:
        found |= ask_classes(task, request.classes)
    if request.heads:
        found |= ask_heads(task, torch.float32)
    _solve(task)
    if "key_seen" in found:
        found["key_seen"] = found["key_seen"].view(torch.bool)
    return TritonStatistics(**found)


def _solve(task: Fields) -> None:
    from headwise.kernels.triton._launch import launch  # Triton is slow to import

    launch(task)
