"""The task of the kernel in Triton: one flat structure, like the problem of the native kernel."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headwise.kernels.rows import LOG2E
from headwise.kernels.spec import AttentionRule, Lowered, Named, RowRequest, check_rule, lower

Strides = tuple[int, ...]
# The fields of a task, while they are filled in.
Fields = dict[str, Any]


class Task(NamedTuple):
    """Tensors, sizes and numbers; a field that is left out is None.

    Strides are those of texts, heads, queries (or keys) and the last axis; without them an array
    is dense.
    """

    q: Any
    k: Any
    v: Any
    q_stride: Strides
    k_stride: Strides
    v_stride: Strides
    H: int
    G: int
    T: int
    S: int
    # Logits are products * factor; under a cap, cap * tanh of that. Both are in base 2.
    factor: float
    cap: float | None
    left: int
    right: int
    key_range: Any  # [B, 2]
    documents: Any  # [B, S]
    mask: Any  # of bytes
    mask_stride: Strides | None
    bias: Any
    bias_stride: Strides | None
    table: Any  # by distance: that of query `i` and key `j` is at S - 1 + i - j
    table_stride: Strides | None
    sinks: Any  # [H]
    query_at: Any  # [B, T]; without positions the last query is at the last key
    key_at: Any  # [B, S]
    N: int
    keys: Any  # [B, T, N]
    classes: Any  # [B, S, C]
    # Outputs: [B, H, T] unless noted.
    heads: Any  # [B, H, T, Dv]
    heads_stride: Strides | None
    n_keys: Any
    lse: Any
    max_logit: Any
    max_weight: Any
    entropy: Any
    argmax: Any
    participation: Any
    distance: Any
    even_distance: Any
    sink: Any
    key_mass: Any  # [B, H, T, N]
    key_seen: Any  # [B, H, T, N], bytes
    class_mass: Any  # [B, H, T, C]
    class_keys: Any  # [B, H, T, C]
    # Compiled in: widths and classes, powers of two that hold them, and the sides of a block.
    D: Any
    Dv: Any
    C: Any
    WIDTH: Any
    VALUES: Any
    CLASSES: Any
    ROWS: Any
    KEYS: Any


def task_of(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B Hkv S D"],
    v: Float[Tensor, "B Hkv S Dv"],
    rule: AttentionRule,
) -> Fields:
    """The inputs of a task: queries, keys, values and their rule."""
    check_rule(rule, q, k)
    (_, H, T, _), (_, Hkv, S, _) = q.shape, k.shape
    lowered = lower(rule, T, S, q.device)
    fields: Fields = dict.fromkeys(Task._fields)
    fields |= {"q": q, "k": k, "v": v}
    fields |= {f"{name}_stride": fields[name].stride() for name in "qkv"}
    fields |= {"H": H, "G": H // Hkv, "T": T, "S": S, "N": 0}
    return fields | _of_logits(lowered, T + S) | _hidden(lowered, q, S) | _added(lowered, q, S)


def _of_logits(lowered: Lowered, most: int) -> Fields:
    capped = lowered.softcap > 0
    return {
        "factor": lowered.scale / lowered.softcap if capped else lowered.scale * LOG2E,
        "cap": lowered.softcap * LOG2E if capped else None,
        # A window is at most as wide as the text.
        "left": most if lowered.left is None else min(lowered.left, most),
        "right": most if lowered.right is None else min(lowered.right, most),
    }


def _hidden(lowered: Lowered, q: Tensor, S: int) -> Fields:
    B, H, T, _ = q.shape
    fields: Fields = {}
    if lowered.key_range is not None:
        fields["key_range"] = _dense(lowered.key_range, q, torch.int32, B, 2)
    if lowered.documents is not None:
        fields["documents"] = _dense(lowered.documents, q, torch.int64, B, S)
    if lowered.mask is not None:
        fields["mask"] = lowered.mask.to(q.device).view(torch.uint8).expand(B, H, T, S)
        fields["mask_stride"] = fields["mask"].stride()
    return fields


def _added(lowered: Lowered, q: Tensor, S: int) -> Fields:
    B, H, T, _ = q.shape
    fields: Fields = {}
    if lowered.sinks is not None:
        fields["sinks"] = _dense(lowered.sinks, q, torch.float32, H)
    if lowered.bias is not None:
        fields["bias"] = lowered.bias.detach().to(q.device).expand(B, H, T, S)
        fields["bias_stride"] = fields["bias"].stride()
    if lowered.by_distance is not None:
        table = lowered.by_distance.detach().to(q.device, torch.float32).contiguous()
        fields["table"] = table.expand(B, H, T + S - 1)
        fields["table_stride"] = fields["table"].stride()
    return fields


def _dense(x: Tensor, q: Tensor, dtype: torch.dtype, *shape: int) -> Tensor:
    return x.detach().to(q.device, dtype).expand(shape).contiguous()


def add_heads(task: Fields, dtype: torch.dtype) -> Named:
    """Add heads in the layout of torch's kernel: the heads of a token side by side."""
    q, Dv = task["q"], task["v"].shape[3]
    B, H, T, _ = q.shape
    heads = q.new_empty(B, T, H, Dv, dtype=dtype).transpose(1, 2)
    task |= {"heads": heads, "heads_stride": heads.stride()}
    return {"heads": heads}


def add_output(
    task: Fields, *names: str, last: tuple[int, ...] = (), dtype: torch.dtype = torch.float32
) -> Named:
    """Add outputs: an entry, or several, for each row."""
    q = task["q"]
    outputs = {name: q.new_empty(*q.shape[:3], *last, dtype=dtype) for name in names}
    task |= outputs
    return outputs


def add_distances(task: Fields, request: RowRequest) -> Named:
    """Add the mean distances; without positions the last query is at the last key."""
    q, T, S = task["q"], task["T"], task["S"]
    if request.query_at is not None and request.key_at is not None:
        task["query_at"] = _dense(request.query_at, q, torch.float32, len(q), T)
        task["key_at"] = _dense(request.key_at, q, torch.float32, len(q), S)
    return add_output(task, "distance", "even_distance")


def add_keys(task: Fields, keys: Int[Tensor, "B T N"]) -> Named:
    """Add the mass on single keys; an index beyond the last is no key."""
    q, N = task["q"], keys.shape[2]
    indices = keys.clamp(-1, task["S"])
    task |= {"N": N, "keys": _dense(indices, q, torch.int32, len(q), task["T"], N)}
    return add_output(task, "key_mass", last=(N,)) | add_output(
        task, "key_seen", last=(N,), dtype=torch.uint8
    )


def add_classes(task: Fields, classes: Float[Tensor, "B S C"]) -> Named:
    """Add the mass on classes of keys."""
    q, C = task["q"], classes.shape[2]
    task["classes"] = _dense(classes, q, torch.float32, len(q), task["S"], C)
    return add_output(task, "class_mass", "class_keys", last=(C,))
