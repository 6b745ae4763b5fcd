"""The attention function that Hugging Face models call under the name "headwise"."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from headwise.errors import UnsupportedError
from headwise.kernels import (
    AttendOutput,
    AttentionProblem,
    Extras,
    attend_by_rule,
    autocast_inputs,
    computes_both_at_once,
    native_is_faster,
    under_autocast,
)
from headwise.models.attention._rule_mask import NAME, RuleMask, unless_read
from headwise.models.attention.huggingface._rule import is_causal, keys_read, rule_of
from headwise.models.attention.huggingface._transformers import (
    check_source,
    collects_weights,
    sdpa_attention_forward,
)

# What a call may have besides queries, keys, values and a mask.
_EXTRA = frozenset(("softcap", "s_aux", "sinks", "indices", "position_bias"))
_NOT_OF_SDPA = _EXTRA - {"position_bias"}
# What else is read here, or by `is_causal`.
_READ = frozenset(("is_causal", "output_attentions"))
# What neither `eager` nor `sdpa` reads, and why the answer does not depend on it.
IRRELEVANT = {
    "queries and keys have been rotated by it, and the mask keeps packed texts apart": (
        "cache_position", "position_ids",
    ),
    "the mask hides the keys outside of it": ("sliding_window",),
    "it is for kernels without a mask; here the mask keeps packed texts apart": (
        "cu_seq_lens_k", "cu_seq_lens_q", "max_length_k", "max_length_q", "seq_idx",
    ),
    "it says in which order a kernel adds up gradients": ("deterministic",),
    "it is for the model around the attention": (
        "input_ids", "num_items_in_batch", "output_hidden_states", "output_router_logits",
        "return_dict", "use_cache",
    ),
    "tokenizers and processors return it, and models hand on what they do not read": (
        "image_sizes", "length", "mm_token_type_ids", "special_tokens_mask", "token_type_ids",
    ),
}  # fmt: skip
_MASK_DTYPES = {torch.bool, torch.float64, torch.float32, torch.bfloat16, torch.float16}
_KNOWN = _EXTRA.union(_READ, *IRRELEVANT.values())


def attention_forward(
    module: nn.Module,
    query: Float[Tensor, "B H T D"],
    key: Float[Tensor, "B Hkv S D"],
    value: Float[Tensor, "B Hkv S Dv"],
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **more: Any,
) -> tuple[Float[Tensor, "B T H Dv"], Float[Tensor, "B H T S"] | None]:
    """The heads of an attention layer, and its weights if the model was asked for them.

    Calls that torch computes as fast, or that only torch can compute, go to the function of
    `sdpa`.

    Raises:
        UnsupportedError: an argument is unknown, the mask is neither of booleans nor of floats, or
            the module does for `sdpa` alone what its answer depends on.
    """
    check_source(type(module))
    _check_arguments(module, attention_mask, more)
    given = {"dropout": dropout, "scaling": scaling, **more}
    call = Call.of(module, query, key, value, attention_mask, given)
    if call.is_left_to_torch:
        return call.heads_by_torch(), None
    result = attend_by_rule(call.problem(call.needs_weights))
    if isinstance(result, AttendOutput):
        return result.heads.transpose(1, 2), result.weights
    return result.transpose(1, 2), None


def _check_arguments(module: nn.Module, mask: Any, more: dict[str, Any]) -> None:
    """Refuse what would be left out of account."""
    name = type(module).__name__
    unknown = sorted(key for key in more.keys() - _KNOWN if more[key] is not None)
    if unknown:
        raise UnsupportedError(
            f"headwise attention: {name} passes {', '.join(unknown)}, which is not known here. "
            f"Load the model with attn_implementation='sdpa' or 'eager'."
        )
    if mask is None or (isinstance(mask, Tensor) and mask.dtype in _MASK_DTYPES):
        return
    kind = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
    raise UnsupportedError(
        f"headwise attention: {name} has a mask of {kind}. "
        f"Give booleans (True = may attend) or floats (added to the logits)."
    )


class Call(NamedTuple):
    """A call of the attention interface of transformers."""

    module: nn.Module
    q: Float[Tensor, "B H T D"]
    k: Float[Tensor, "B Hkv S D"]
    v: Float[Tensor, "B Hkv S Dv"]
    mask: Tensor | None
    arguments: dict[str, Any]

    @classmethod
    def of(
        cls, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, kwargs: dict[str, Any]
    ) -> "Call":
        """A call from its keyword arguments."""
        return cls(module, q, k, v, unless_read(mask), kwargs)

    @property
    def needs_weights(self) -> bool:
        """Whether the model was asked for the weights."""
        return bool(self.arguments.get("output_attentions")) or collects_weights()

    @property
    def is_left_to_torch(self) -> bool:
        """Whether `sdpa` computes this, and the kernel would not do so faster."""
        q, k, v, given = self.q, self.k, self.v, self.arguments
        if self.needs_weights:
            return False
        names = _NOT_OF_SDPA.intersection(given)
        if names and any(given[name] is not None for name in names):
            return False
        is_tensor = self.mask is not None and not isinstance(self.mask, RuleMask)
        has_tensor = is_tensor or given.get("position_bias") is not None
        if given.get("dropout") or not q.is_cpu or not native_is_faster(q, k, has_tensor):
            return True
        fits = q.ndim == k.ndim == 4 and q.shape[0] == k.shape[0] and v.shape[:3] == k.shape[:3]
        mask_fits = self.mask is None or self.mask.ndim == 4
        return not (fits and mask_fits)

    def heads_by_torch(self) -> Float[Tensor, "B T H Dv"]:
        """The heads by the function of `sdpa`."""
        mask = self.mask.visible() if isinstance(self.mask, RuleMask) else self.mask
        causal = mask is None and is_causal(self.module, self.q.shape[2], self.arguments, NAME)
        given = self.arguments | {"is_causal": causal}
        heads, _ = sdpa_attention_forward(self.module, self.q, self.k, self.v, mask, **given)
        return heads

    def native_problem(self) -> AttentionProblem | None:
        """The call for the native kernel, which can add statistics; None if it cannot."""
        mask = self.mask
        is_added = mask is not None and mask.is_floating_point() and not isinstance(mask, RuleMask)
        if self.is_left_to_torch or self.needs_weights or is_added or under_autocast(self.q):
            return None
        problem = self.problem()
        return problem if computes_both_at_once(problem) else None

    def problem(self, needs_weights: bool = False) -> AttentionProblem:
        """The call as `attend` reads it: by a rule, on the used keys, in autocast's dtype."""
        module, q, k, v, mask, given = self
        S = keys_read(module, q.shape[2], k.shape[2], mask, NAME, given)
        rule = rule_of(module, NAME, q, k, mask, given, n_keys=S)
        if k.shape[2] != S:
            k, v = k[:, :, :S], v[:, :, :S]
        dropout = given.get("dropout") or 0.0
        extras = Extras(weights=needs_weights)
        return AttentionProblem(*autocast_inputs(q, k, v), rule, dropout, extras)
