"""The attention function that Hugging Face models call under the name "headwise"."""

from collections.abc import Callable, MutableMapping
from functools import partial, reduce
from operator import add
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from headwise._torch_private import can_read, is_traced, needs_gradient, version_of
from headwise.errors import UnsupportedError
from headwise.kernels import (
    AttendOutput,
    AttentionProblem,
    AttentionRule,
    Bias,
    ComputeHeads,
    Outline,
    TensorBias,
    attend,
    autocast_inputs,
    computes_both_at_once,
    is_shorter_than_a_call,
    make_rule,
    native_is_faster,
    plain_outline,
    prepare_plain,
    remember,
    under_autocast,
)
from headwise.masks import Mask, as_mask
from headwise.masks.parts import split_additive, top_left
from headwise.models.attention._name import NAME
from headwise.models.attention._rule_mask import RuleMask, unless_read
from headwise.models.attention.huggingface._rule import is_causal, select_keys, sinks_of
from headwise.models.attention.huggingface._source import check_source

try:
    from transformers.utils.output_capturing import _active_collector as _collector
except ImportError:  # early versions of transformers 5 have none
    _collector = None

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
    mask = unless_read(attention_mask)
    call = Call(module, query, key, value, mask, dropout, scaling, more)
    route = call.plain_route()
    if route is not None:
        return route.heads(call), None
    if call.is_left_to_torch:
        return _by_torch(call), None
    result = attend(
        *call.inputs(), **call.options(), dropout_p=dropout, need_weights=call.needs_weights
    )
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
    dropout: float
    scaling: float | None
    more: dict[str, Any]

    @classmethod
    def of(
        cls, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, kwargs: dict[str, Any]
    ) -> "Call":
        """A call from its keyword arguments."""
        more = dict(kwargs)
        dropout, scaling = more.pop("dropout", 0.0), more.pop("scaling", None)
        return cls(module, q, k, v, unless_read(mask), dropout, scaling, more)

    @property
    def needs_weights(self) -> bool:
        """Whether the model was asked for the weights."""
        return bool(self.more.get("output_attentions")) or _collects_weights()

    @property
    def is_left_to_torch(self) -> bool:
        """Whether `sdpa` computes this, and the kernel would not do so faster."""
        q, k, v, more = self.q, self.k, self.v, self.more
        if self.needs_weights or any(more.get(name) is not None for name in _NOT_OF_SDPA):
            return False
        is_tensor = self.mask is not None and not isinstance(self.mask, RuleMask)
        has_tensor = is_tensor or more.get("position_bias") is not None
        if self.dropout or not q.is_cpu or not native_is_faster(q, k, has_tensor):
            return True
        fits = q.ndim == k.ndim == 4 and q.shape[0] == k.shape[0] and v.shape[:3] == k.shape[:3]
        mask_fits = self.mask is None or self.mask.ndim == 4
        return not (fits and mask_fits)

    def plain_route(self) -> "Route | None":
        """How a call of queries, keys and values alone is computed; None for any other.

        A token takes about as long to decide about as to compute, so it is decided once for all
        layers.
        """
        q, k, v, more = self.q, self.k, self.v, self.more
        if self.mask is not None or self.dropout or self.needs_weights:
            return None
        if not _EXTRA.isdisjoint(more) and any(more.get(name) is not None for name in _EXTRA):
            return None
        if q.ndim == 4 and q.is_cpu and is_shorter_than_a_call(q, k):
            return BY_TORCH
        causal = self.is_causal
        if causal and q.shape[2] != k.shape[2]:
            return None
        outline = plain_outline(q, k, v, causal, self.scaling)
        route = None if outline is None else _ROUTES.get(outline)
        if route is not None or outline is None or under_autocast(q):
            return route
        if self.is_left_to_torch:
            return remember(_ROUTES, outline, BY_TORCH)
        compute = prepare_plain(q, k, v, causal, self.scaling, outline)
        problem = self._problem()
        rule = problem.rule if computes_both_at_once(problem) else None
        return remember(_ROUTES, outline, Route(partial(_by_kernel, compute), rule))

    def native_problem(self) -> AttentionProblem | None:
        """The call for the native kernel, which can add statistics; None if it cannot."""
        route = self.plain_route()
        if route is not None:
            q, k, v = self.q, self.k, self.v
            return None if route.rule is None else AttentionProblem(q, k, v, route.rule)
        is_added = self._float_mask is not None
        if self.is_left_to_torch or self.needs_weights or is_added or under_autocast(self.q):
            return None
        problem = self._problem()
        return problem if computes_both_at_once(problem) else None

    def _problem(self) -> AttentionProblem:
        rule = make_rule(head_dim=self.q.shape[-1], **self.options())
        return AttentionProblem(*self.inputs(), rule, self.dropout)

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values as the kernel reads them: the used keys, in autocast's dtype."""
        q, k, v, S = self.q, self.k, self.v, self._n_keys()
        if k.shape[2] != S:
            k, v = k[:, :, :S], v[:, :, :S]
        return autocast_inputs(q, k, v)

    def options(self) -> dict[str, Any]:
        """The options of `attend`, but for dropout."""
        T, S = self.q.shape[2], self._n_keys()
        biases: list[Bias] = []
        visible, added = self._visible(T, S), self._float_mask
        if added is not None:
            hidden, added = split_additive(added, "headwise attention", allow_binary=True)
            visible = hidden if visible is None else visible
            biases += [] if added is None else [TensorBias(added)]
        position_bias = self.more.get("position_bias")
        if position_bias is not None and not _holds_zeros(position_bias):
            biases.append(TensorBias(position_bias[..., :S]))
        return {
            "mask": select_keys(visible, self.more.get("indices"), self.k.shape[2], S),
            "bias": reduce(add, biases) if biases else None,
            "scale": self.scaling,
            "softcap": self.more.get("softcap"),
            "sinks": sinks_of(self.more),
        }

    @property
    def _float_mask(self) -> Float[Tensor, "..."] | None:
        """The mask if it is added to the logits; one that is a rule is not."""
        if self.mask is None or isinstance(self.mask, RuleMask):
            return None
        return self.mask if self.mask.is_floating_point() else None

    @property
    def is_causal(self) -> bool:
        """Whether there is no mask and the call is causal."""
        return self.mask is None and is_causal(self.module, self.q.shape[2], self.more, NAME)

    def _n_keys(self) -> int:
        """The number of keys without the unused end of a cache, where that is known."""
        S = self.k.shape[2]
        if isinstance(self.mask, RuleMask):
            return self.mask.n_keys
        return min(S, self.q.shape[2]) if self.is_causal else S

    def _visible(self, T: int, S: int) -> Mask | None:
        if isinstance(self.mask, RuleMask):
            return self.mask.rule
        if self.mask is not None:
            return as_mask(self.mask) if self.mask.dtype == torch.bool else None
        if not self.is_causal:
            return None
        return top_left(T, S)


class Route(NamedTuple):
    """How calls of an outline are computed."""

    heads: Callable[[Call], Float[Tensor, "B T H Dv"]]
    rule: AttentionRule | None  # by which the native kernel computes them; None if it does not


_ROUTES: dict[Outline, Route] = {}


def _by_torch(call: Call) -> Float[Tensor, "B T H Dv"]:
    """The heads by the function of `sdpa`."""
    mask = call.mask.visible() if isinstance(call.mask, RuleMask) else call.mask
    heads, _ = sdpa_attention_forward(
        call.module, call.q, call.k, call.v, mask, dropout=call.dropout,
        scaling=call.scaling, **call.more | {"is_causal": call.is_causal},
    )  # fmt: skip
    return heads


def _by_kernel(compute: ComputeHeads, call: Call) -> Float[Tensor, "B T H Dv"]:
    return compute(call.q, call.k, call.v).transpose(1, 2)


BY_TORCH = Route(_by_torch, None)


# Biases that held zeros alone, and how often they had been changed in place by then.
_zeros: MutableMapping[Tensor, int] = WeakTensorKeyDictionary()


def _holds_zeros(bias: Tensor) -> bool:
    """Whether a bias is known to add nothing, such as that of T5's cross-attention.

    All layers share it, so it is read once.
    """
    if not bias.numel() or not can_read(bias) or is_traced() or needs_gradient(bias):
        return False
    if bias.is_inference():  # changes of it leave no trace
        return bias[(0,) * bias.ndim].item() == 0 and not bool(bias.any())
    if _zeros.get(bias) == version_of(bias):
        return True
    if bias[(0,) * bias.ndim].item() != 0 or bool(bias.any()):
        return False
    _zeros[bias] = version_of(bias)
    return True


def _collects_weights() -> bool:
    """Whether the model that runs was asked for weights, which transformers collects by hooks."""
    if _collector is None:
        return False
    names = _collector.global_var if torch.compiler.is_compiling() else _collector.get()
    return bool(names) and any(name.endswith("attentions") for name in names)
