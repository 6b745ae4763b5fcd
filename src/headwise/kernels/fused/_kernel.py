"""The fused kernel's side of the contract."""

from functools import partial

import torch.nn.functional as F

from headwise.kernels.fused._attend import attend_fused
from headwise.kernels.fused._form import exceeds_float16, form_of, is_packed, is_wide
from headwise.kernels.spec import (
    AttentionKernel,
    AttentionProblem,
    ComputeHeads,
    KernelChoice,
    Named,
)
from headwise.kernels.spec.cpu import PACKED


class FusedKernel(AttentionKernel):
    """`scaled_dot_product_attention`: it has no softcap, no sinks, and no statistics of rows."""

    name = "fused"

    def why_not(self, problem: AttentionProblem) -> str | None:
        rule = problem.rule
        if rule.needs_double:
            return f"at scale={rule.scale:g} logits need float64, which is left to the rows"
        missing = [name for name in ("softcap", "sinks") if getattr(rule, name) is not None]
        if missing:
            return f"it has no {' and no '.join(missing)}"
        if problem.dropout_p and any(problem.extras):
            return f"it does not return which weights it drops (dropout_p={problem.dropout_p})"
        return None

    def plan(self, problem: AttentionProblem, reason: str) -> KernelChoice:
        q, k, _, rule, *_ = problem
        form, why_form = form_of(rule, q, k)
        packed, wide = is_packed(form, q, k), is_wide(form, q, k)
        exceeds = exceeds_float16(rule, q)
        if not (packed or wide or exceeds):
            return KernelChoice(self.name, form, packed, wide, f"{reason}; {why_form}")
        reasons = [reason, why_form]
        if packed:
            reasons.append(PACKED)
        if exceeds:
            reasons.append(f"its bias is too large for {q.dtype}")
        elif wide:
            reasons.append(f"it is slower in {q.dtype} than in float32")
        return KernelChoice(self.name, form, packed, wide or exceeds, "; ".join(reasons))

    def attend(self, problem: AttentionProblem, choice: KernelChoice) -> Named:
        return attend_fused(problem, choice)

    def prepare_heads(
        self, problem: AttentionProblem, choice: KernelChoice, otherwise: ComputeHeads
    ) -> ComputeHeads:
        if choice.form != "none" or choice.packed or choice.wide:
            return otherwise
        grouped = problem.q.shape[1] != problem.k.shape[1]
        # Neither a function of Python nor a problem: torch's own function takes less time.
        return partial(F.scaled_dot_product_attention, scale=problem.rule.scale, enable_gqa=grouped)


FUSED = FusedKernel()
