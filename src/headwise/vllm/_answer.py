"""Whole prompts, answered and described in one pass of our native kernel (`exact=False`)."""

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from headwise.kernels import AttentionRule, RowRequest, make_rule, row_statistics
from headwise.vllm._pages import SPANS, PageLayer

Queries = Float[Tensor, "n H D"]
Keys = Float[Tensor, "n Hkv D"]


def rule_of(impl: Any) -> AttentionRule:
    """The attention of one of vLLM's implementations, whose window includes the query itself."""
    window = impl.sliding_window
    return make_rule(
        head_dim=impl.head_size, is_causal=True, near=(window - 1, 0) if window > 0 else None,
        scale=impl.scale, softcap=impl.logits_soft_cap or None,
    )  # fmt: skip


def answer_prompts(
    layer: PageLayer,
    rule: AttentionRule,
    tokens: tuple[Queries, Keys, Keys],
    output: Queries,
    starts: list[int],
    groups: Int64[np.ndarray, "groups four"],
    rows: Int64[np.ndarray, "rows two"],
    spans: Int64[np.ndarray, "cells spans two"],
) -> None:
    """Write the heads of whole prompts, and add the rows that count to the sums of a layer.

    Args:
        tokens: Queries, keys and values of all prompts, one after the other.
        output: Where vLLM expects the heads.
        starts: The first token of each prompt, and one past the last.
        groups: First row, one past the last row, prompt, cell; see `make_step`.
    """
    by_prompt = {prompt: (first, stop, cell) for first, stop, prompt, cell in groups.tolist()}
    for prompt, (start, end) in enumerate(pairwise(starts)):
        q, k, v = (x[start:end].transpose(0, 1)[None] for x in tokens)
        first, stop, cell = by_prompt.get(prompt, (0, 0, 0))
        positions = torch.arange(end - start)
        begins, ends = torch.from_numpy(spans[cell]).T
        is_inside = (positions[:, None] >= begins) & (positions[:, None] < ends)
        request = RowRequest(
            distance=True,
            keys=torch.stack([torch.zeros_like(positions), positions, positions - 1], 1)[None],
            classes=is_inside.float()[None],
            heads=True,
        )
        statistics = row_statistics(q, k, v, rule, request)
        assert statistics.heads is not None  # they were requested
        output[start:end].view(-1, *q.shape[1::2]).copy_(statistics.heads[0].transpose(0, 1))
        _add(layer, cell, statistics, torch.from_numpy(rows[first:stop, 1]))


def _add(layer: PageLayer, cell: int, statistics: Any, counted: Tensor) -> None:
    """Add the counted rows: which are eligible is the same rule as of `observe`."""

    def of_rows(values: Tensor) -> Tensor:
        return values[0][:, counted].double()  # H rows *columns

    n_keys = of_rows(statistics.n_keys)
    several, everywhere = n_keys > 1, n_keys > 0
    nothing = torch.full_like(n_keys, torch.nan)
    seen = of_rows(statistics.key_seen) > 0
    keys = of_rows(statistics.class_keys)
    columns = [  # value, eligible, under uniform attention
        (of_rows(statistics.entropy), several, n_keys.log()),
        (of_rows(statistics.max_weight), several, 1 / n_keys),
        *(
            (of_rows(statistics.key_mass)[..., i], several & seen[..., i], 1 / n_keys)
            for i in range(3)
        ),
        (of_rows(statistics.distance), several, of_rows(statistics.even_distance)),
        (of_rows(statistics.max_logit), everywhere, nothing),
        (of_rows(statistics.lse), everywhere, nothing),
        *(
            (
                of_rows(statistics.class_mass)[..., i],
                several & (keys[..., i] > 0),
                keys[..., i] / n_keys,
            )
            for i in range(SPANS)
        ),
    ]
    values, eligible, even = (torch.stack(parts, -1) for parts in zip(*columns, strict=True))
    sums = layer.sums
    sums.total[cell] += torch.where(eligible, values, 0.0).sum(1).numpy()
    sums.even[cell] += torch.where(eligible, even, 0.0).sum(1)[0].numpy()
    sums.count[cell] += eligible.sum(1)[0].numpy()
    largest = torch.where(eligible, values, -torch.inf).amax(1) if len(counted) else values.sum(1)
    known = largest.masked_fill(~eligible.any(1), torch.nan).numpy()
    sums.maximum[cell] = np.fmax(sums.maximum[cell], known)
