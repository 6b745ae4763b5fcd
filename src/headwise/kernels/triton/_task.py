"""A task on its way to the kernel: one flat structure, as its sibling in C has."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headwise.kernels._request import Named, RowRequest
from headwise.kernels._rule import Rule, check_rule
from headwise.kernels._words import Words, words_of
from headwise.kernels.rows import LOG2E

Steps = tuple[int, ...]
# The fields of a task, while they are filled in.
Fields = dict[str, Any]


class Task(NamedTuple):
    """Tensors, sizes and numbers; what is left out is None.

    Steps are those of texts, heads, queries (or keys) and the last axis; where there are none, an
    array is dense.
    """

    q: Any
    k: Any
    v: Any
    q_step: Steps
    k_step: Steps
    v_step: Steps
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
    mask_step: Steps | None
    bias: Any
    bias_step: Steps | None
    table: Any  # by distance: that of query `i` and key `j` is at S - 1 + i - j
    table_step: Steps | None
    sinks: Any  # [H]
    query_at: Any  # [B, T]
    key_at: Any  # [B, S]
    N: int
    keys: Any  # [B, T, N]
    classes: Any  # [B, S, C]
    # What is found: [B, H, T] where nothing else is said.
    heads: Any  # [B, H, T, Dv]
    heads_step: Steps | None
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
    rule: Rule,
) -> Fields:
    """Queries, keys, values and their rule; nothing is asked for yet."""
    check_rule(rule, q)
    (_, H, T, _), (_, Hkv, S, _) = q.shape, k.shape
    words = words_of(rule, T, S, q.device)
    fields: Fields = dict.fromkeys(Task._fields)
    fields |= {"q": q, "k": k, "v": v}
    fields |= {f"{name}_step": fields[name].stride() for name in "qkv"}
    fields |= {"H": H, "G": H // Hkv, "T": T, "S": S, "N": 0}
    return fields | _of_logits(words, T + S) | _hidden(words, q, S) | _added(words, q, S)


def _of_logits(words: Words, most: int) -> Fields:
    capped = words.softcap > 0
    return {
        "factor": words.scale / words.softcap if capped else words.scale * LOG2E,
        "cap": words.softcap * LOG2E if capped else None,
        # No window reaches farther than all there is.
        "left": most if words.left is None else min(words.left, most),
        "right": most if words.right is None else min(words.right, most),
    }


def _hidden(words: Words, q: Tensor, S: int) -> Fields:
    B, H, T, _ = q.shape
    found: Fields = {}
    if words.key_range is not None:
        found["key_range"] = _dense(words.key_range, q, torch.int32, B, 2)
    if words.documents is not None:
        found["documents"] = _dense(words.documents, q, torch.int64, B, S)
    if words.mask is not None:
        found["mask"] = words.mask.to(q.device).view(torch.uint8).expand(B, H, T, S)
        found["mask_step"] = found["mask"].stride()
    return found


def _added(words: Words, q: Tensor, S: int) -> Fields:
    B, H, T, _ = q.shape
    found: Fields = {}
    if words.sinks is not None:
        found["sinks"] = _dense(words.sinks, q, torch.float32, H)
    if words.bias is not None:
        found["bias"] = words.bias.detach().to(q.device).expand(B, H, T, S)
        found["bias_step"] = found["bias"].stride()
    if words.by_distance is not None:
        table = words.by_distance.detach().to(q.device, torch.float32).contiguous()
        found["table"] = table.expand(B, H, T + S - 1)
        found["table_step"] = found["table"].stride()
    return found


def _dense(x: Tensor, q: Tensor, dtype: torch.dtype, *shape: int) -> Tensor:
    return x.detach().to(q.device, dtype).expand(shape).contiguous()


def ask_heads(task: Fields, dtype: torch.dtype) -> Named:
    """As torch's kernel leaves them: the heads of a token side by side."""
    q, Dv = task["q"], task["v"].shape[3]
    B, H, T, _ = q.shape
    heads = q.new_empty(B, T, H, Dv, dtype=dtype).transpose(1, 2)
    task |= {"heads": heads, "heads_step": heads.stride()}
    return {"heads": heads}


def ask(
    task: Fields, *names: str, last: tuple[int, ...] = (), dtype: torch.dtype = torch.float32
) -> Named:
    """Arrays that the kernel shall write: an entry, or several, for each row."""
    q = task["q"]
    found = {name: q.new_empty(*q.shape[:3], *last, dtype=dtype) for name in names}
    task |= found
    return found


def ask_distances(task: Fields, request: RowRequest) -> Named:
    """How far away what is attended to is; where nothing else is said, all end in the corner."""
    q, T, S = task["q"], task["T"], task["S"]
    if request.query_at is None or request.key_at is None:
        queries, keys = torch.arange(S - T, S), torch.arange(S)
    else:
        queries, keys = request.query_at, request.key_at
    task["query_at"] = _dense(queries, q, torch.float32, len(q), T)
    task["key_at"] = _dense(keys, q, torch.float32, len(q), S)
    return ask(task, "distance", "even_distance")


def ask_keys(task: Fields, keys: Int[Tensor, "B T N"]) -> Named:
    """The mass on single keys; what is beyond the last is none."""
    q, N = task["q"], keys.shape[2]
    at = keys.clamp(-1, task["S"])
    task |= {"N": N, "keys": _dense(at, q, torch.int32, len(q), task["T"], N)}
    return ask(task, "key_mass", last=(N,)) | ask(task, "key_seen", last=(N,), dtype=torch.uint8)


def ask_classes(task: Fields, classes: Float[Tensor, "B S C"]) -> Named:
    """The mass on classes of keys."""
    q, C = task["q"], classes.shape[2]
    task["classes"] = _dense(classes, q, torch.float32, len(q), task["S"], C)
    return ask(task, "class_mass", "class_keys", last=(C,))
