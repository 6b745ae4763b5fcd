"""The kernel in plain PyTorch, which computes everything, and its statistics of rows."""

from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headwise.kernels._contract import (
    AttentionKernel,
    AttentionProblem,
    Guarded,
    KernelChoice,
    Named,
    RowRequest,
    RowStatistics,
    guard_nonfinite,
)
from headwise.kernels._rule import AttentionRule
from headwise.kernels.rows._attend import attend_rows, log_sum_exp
from headwise.kernels.rows._cells import (
    LN2,
    Cell,
    Powers,
    Scratch,
    in_double,
    is_without_keys,
    mix,
    over_cells,
    positive,
    powers_of_cell,
    restore_dtype,
)


class RowsKernel(AttentionKernel):
    """Blocks of rows in plain PyTorch."""

    name = "rows"
    label = "blocks of rows"

    def why_not(self, problem: AttentionProblem, request: RowRequest | None = None) -> str | None:
        return None

    def attend(self, problem: AttentionProblem, choice: KernelChoice) -> Named:
        q, k, v, rule, dropout_p, extras = problem
        # Packing heads takes lengths that are fixed: an exported program repeats keys instead.
        if torch.compiler.is_exporting():
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        return attend_rows(q, k, v, rule, dropout_p, extras.weights, extras.entropy)

    @torch.no_grad()
    def statistics(self, problem: AttentionProblem, request: RowRequest) -> RowStatistics:
        """Statistics of the weights of every row, a cell at a time.

        Source:
            entropy from the moments of a running softmax: H = ln l − u / l with l = Σ exp(z − m)
            and u = Σ exp(z − m)(z − m).
        """
        rule, dtype = problem.rule, problem.q.dtype
        q, k, v = in_double(*problem[:4])
        (B, H, T, _), S = q.shape, k.shape[2]
        work = torch.promote_types(q.dtype, torch.float32)
        problem = problem._replace(q=q, k=k, v=v if request.heads else v[..., :0])
        safe = guard_nonfinite(problem) if request.heads else Guarded(problem, None)
        # Values and shares in classes are columns of one matrix product with the weights.
        columns = v = safe.problem.v  # only the values are multiplied by weights of 0
        if request.classes is not None:
            members = request.classes[:, None].expand(-1, v.shape[1], -1, -1)
            columns = torch.cat([v.to(torch.promote_types(v.dtype, torch.float32)), members], -1)
        heads = q.new_empty(B, H, T, v.shape[3], dtype=work)
        received = q.new_zeros(B, H, S, dtype=work)
        scratch = Scratch()

        def compute(cell: Cell) -> Named:
            soft = powers_of_cell(q, k, rule, cell, scratch)
            names = ("kept", "total", "peak", "highest", "max_logit")
            results = {name: getattr(soft, name) for name in names} | {"n_keys": _n_keys(soft)}
            if columns.shape[-1]:
                mixed = mix(cell, soft.powers, columns, scratch)
                into = heads[cell.texts, cell.heads, cell.rows]
                torch.div(mixed[..., : v.shape[3]], soft.divisor, out=into)
                if request.classes is not None:
                    results["class_mass"] = mixed[..., v.shape[3] :] / soft.divisor
            results |= _on_columns(soft, cell, request, scratch)
            if request.distance:
                results |= _distance(soft, cell, request, scratch)
            if request.participation:
                results["participation"] = _participation(soft, rule)
            if request.argmax:
                results["argmax"] = _argmax(soft, cell)
            if request.received is not None:
                counted = request.received[cell.texts, None, cell.rows, None]  # b 1 R 1
                received[cell.texts, cell.heads, cell.keys] += _received(soft, counted)
            if request.entropy:  # last: it reuses the logits' memory
                results["moment"] = _moment(soft)
            return results

        results = _finish(over_cells(q, k, rule, compute), rule)
        results |= {} if request.received is None else {"received": received}
        results |= {"heads": safe.mark(heads)} if request.heads else {}
        return RowStatistics(**restore_dtype(results, dtype, rule), kernel=self.label)


def _finish(rows: Named, rule: AttentionRule) -> Named:
    """Statistics from sums over the keys of each row."""
    kept, total, highest = (rows.pop(name) for name in ("kept", "total", "highest"))
    peak, max_logit = rows.pop("peak"), rows.pop("max_logit")
    divisor = positive(total)
    rows["lse"] = log_sum_exp(peak, total)
    rows["max_logit"] = torch.where(is_without_keys(max_logit), -torch.inf, max_logit * LN2)
    rows["max_weight"] = torch.exp2(highest) / divisor
    if rule.sinks is not None:
        rows["sink"] = 1.0 - kept / divisor
    if "moment" in rows:
        # A head that reads one key has entropy 0; rounding must not make it negative.
        nats = (torch.log2(divisor) * kept - rows.pop("moment")) / divisor * LN2
        rows["entropy"] = nats.clamp_(min=0.0)
    return rows


def _n_keys(soft: Powers) -> Int[Tensor, "b h R"]:
    every = torch.full(soft.total.shape, soft.powers.shape[-1], device=soft.total.device)
    return every.sub_(soft.hidden.number)


def _moment(soft: Powers) -> Float[Tensor, "b h R"]:
    """Σ p · ln p up to the total and the base. It takes the memory of `shifted`."""
    parts = soft.shifted.mul_(soft.powers)
    results = parts.sum(-1)
    if results.isnan().any():  # perhaps 0 · −inf, of a masked key
        results = soft.hidden.fill(parts, 0.0).sum(-1)
    return results


def _participation(soft: Powers, rule: AttentionRule) -> Float[Tensor, "b h R"]:
    # Under a sink far above all logits the squares of powers vanish.
    relative, kept = soft.powers, soft.kept
    if rule.sinks is not None:
        relative = torch.exp2(soft.shifted - soft.highest.unsqueeze(-1))
        kept = relative.sum(-1)
    squares = torch.linalg.vector_norm(relative, dim=-1).square()
    none = is_without_keys(soft.highest)  # NaN rows stay NaN
    return torch.where(none, 0.0, kept.square() / torch.where(none, 1.0, squares))


def _argmax(soft: Powers, cell: Cell) -> Int[Tensor, "b h R"]:
    if not soft.shifted.shape[-1]:
        return torch.full_like(soft.total, -1, dtype=torch.int64)
    first = soft.shifted.argmax(-1) + cell.tile.keys.start
    return torch.where(is_without_keys(soft.highest) | soft.highest.isnan(), -1, first)


def _received(soft: Powers, counted: Bool[Tensor, "b 1 R 1"]) -> Float[Tensor, "b h n"]:
    """The sum of the weights that each key receives from the counted queries."""
    share = torch.where(counted, 1.0 / soft.divisor, 0.0).transpose(-1, -2)
    sums = torch.matmul(share, soft.powers)
    if not sums.isfinite().all():  # perhaps of a query that does not count
        sums = torch.matmul(share, soft.powers.masked_fill(~counted, 0.0))
    return sums.squeeze(-2)


def _on_columns(soft: Powers, cell: Cell, request: RowRequest, scratch: Scratch) -> Named:
    """Each measure of the weights, on single keys and on classes of keys."""
    results: Named = {}
    if request.keys is not None:
        columns, results["key_seen"] = _single_keys(soft, cell, request.keys)
    if request.classes is not None:
        members = request.classes[cell.texts, cell.keys].to(soft.powers.dtype)[:, None]  # b 1 n C
        visible = members.sum(-2, keepdim=True)
        for edge, hidden in soft.hidden.edges:
            visible = visible - torch.matmul(hidden.to(members.dtype), members[..., edge, :])
        results["class_keys"] = visible.expand(*soft.powers.shape[:3], -1)
    if not results:
        return results
    for name, amounts, total in _measures(soft, cell, request, scratch):
        if request.keys is not None:
            part = amounts.gather(-1, columns) if amounts.shape[-1] else columns.to(amounts.dtype)
            results[f"key_{name}"] = part.masked_fill(~results["key_seen"], 0.0) / total
        if request.classes is not None and name != "mass":  # mixed together with the values
            results[f"class_{name}"] = torch.matmul(amounts, members) / total
    return results


def _measures(
    soft: Powers, cell: Cell, request: RowRequest, scratch: Scratch
) -> Iterator[tuple[str, Float[Tensor, "b h R n"], Float[Tensor, "b h R 1"]]]:
    """Measures of the weights: their name, the part of each key, and their total."""
    powers = soft.powers
    yield "mass", powers, soft.divisor
    buffer = scratch.take("measure", powers, powers.shape)
    if request.top:
        # By their logits: where all keys are masked, none of them is the largest.
        highest = torch.where(is_without_keys(soft.highest), torch.inf, soft.highest)
        largest = torch.eq(soft.shifted, highest.unsqueeze(-1), out=buffer)
        yield "top", largest, largest.sum(-1, keepdim=True).clamp_(min=1.0)
    if request.key_norms is not None:
        norms = request.key_norms[cell.texts, cell.heads, None, cell.keys].to(powers.dtype)
        parts = torch.mul(powers, norms.where(norms.isfinite(), 0.0), out=buffer)
        yield "share", parts, parts.sum(-1, keepdim=True)


def _single_keys(
    soft: Powers, cell: Cell, keys: Int[Tensor, "B T N"]
) -> tuple[Int[Tensor, "b h R N"], Bool[Tensor, "b h R N"]]:
    """The columns of single keys in a cell, and whether they exist and are visible."""
    b, h, _, n = soft.powers.shape
    inside = keys[cell.texts, cell.rows] - cell.tile.keys.start  # b R N
    seen = ((inside >= 0) & (inside < n))[:, None]
    columns = inside.clamp(0, max(0, n - 1))[:, None].expand(b, h, -1, -1)
    for edge, hidden in soft.hidden.edges:
        # A mask that all heads share is read once.
        there = columns[:, : hidden.shape[1]] - edge.start
        width = edge.stop - edge.start
        results = hidden.expand(b, -1, -1, -1).gather(-1, there.clamp(0, width - 1))
        seen = seen & ~(results & (there >= 0) & (there < width))
    return columns, seen.expand_as(columns)


def _distance(soft: Powers, cell: Cell, request: RowRequest, scratch: Scratch) -> Named:
    """The mean distance to what is attended to, and to all visible keys."""
    if request.query_at is None or request.key_at is None:
        query_at, key_at = cell.tile.query_at[None], cell.tile.key_at[None, None]
    else:
        query_at = request.query_at[cell.texts, cell.rows, None]
        key_at = request.key_at[cell.texts, None, cell.keys]
    work = soft.powers.dtype
    away = (query_at.to(work) - key_at.to(work)).abs_()[:, None]  # b 1 R n
    buffer = scratch.take("measure", soft.powers, soft.powers.shape)
    mean = torch.mul(soft.powers, away, out=buffer).sum(-1) / soft.divisor[..., 0]
    uniform = away.sum(-1)
    for edge, hidden in soft.hidden.edges:
        uniform = uniform - (away[..., edge] * hidden).sum(-1)
    return {"distance": mean, "even_distance": uniform / _n_keys(soft).clamp(min=1)}


ROWS = RowsKernel()
