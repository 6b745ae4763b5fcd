"""A call of transformers' attention interface: its rule under each implementation, and ours."""

from functools import reduce
from operator import and_
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from headwise._torch_private import can_read, is_traced, needs_gradient, under_autocast
from headwise.attention._rule_mask import NAME, RuleMask
from headwise.attention.huggingface._transformers import (
    check_source,
    collects_weights,
    is_written_for_eager,
    sdpa_attention_forward,
)
from headwise.errors import MaskError, UnsupportedError
from headwise.kernels import (
    AttendOutput,
    AttentionProblem,
    AttentionRule,
    Extras,
    TensorBias,
    attend_by_rule,
    autocast_inputs,
    computes_both_at_once,
    make_rule,
    native_is_faster,
)
from headwise.masks import Mask, as_mask, causal, documents, from_flex, window
from headwise.masks.parts import top_left

_CAUSAL = causal()
# What a call may have besides queries, keys, values and a mask, and what of it `sdpa` leaves out.
_LEFT_OUT = ("softcap", "s_aux", "sinks")
_EXTRA = frozenset((*_LEFT_OUT, "indices", "position_bias"))
_NOT_OF_SDPA = _EXTRA - {"position_bias"}
_RULE_TENSORS = _EXTRA - {"softcap"}
# What else is read here.
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
# What of it an operator in a compiled graph is given, or need not be.
_OF_OPERATOR = (_READ | {"softcap", "s_aux", "position_bias", "scaling", "dropout"}).union(
    *IRRELEVANT.values()
)
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
    check_source(module)
    _check_arguments(module, attention_mask, more)
    given = {"dropout": dropout, "scaling": scaling, **more}
    call = Call.of(module, NAME, query, key, value, attention_mask, given)
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
    """A call of the attention interface, as an implementation of it reads the arguments."""

    module: nn.Module
    implementation: str | None
    q: Float[Tensor, "B H T D"]
    k: Float[Tensor, "B Hkv S D"]
    v: Float[Tensor, "B Hkv S Dv"]
    mask: Any  # a tensor of two or four axes, or a BlockMask
    arguments: dict[str, Any]

    @classmethod
    def of(
        cls,
        module: nn.Module,
        implementation: str | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Any,
        arguments: dict[str, Any],
    ) -> "Call":
        """A call from its arguments."""
        mask = mask.latest() if isinstance(mask, RuleMask) else mask
        return cls(module, implementation, q, k, v, mask, arguments)

    @property
    def is_causal(self) -> bool:
        """Whether the call is causal without a mask: by its argument, else by its module.

        Under `eager` it is not, nor under our name where a module was written for `eager`.
        """
        # A decoded token sees all keys before it. The causal flag of `sdpa`, which aligns masks
        # top-left, would leave it the first one alone.
        if self.q.shape[2] <= 1:
            return False
        if self.implementation == NAME:
            config = getattr(self.module, "config", None)
            if is_written_for_eager(type(self.module) if config is None else type(config)):
                return False
        argument = self.arguments.get("is_causal")
        return bool(getattr(self.module, "is_causal", True) if argument is None else argument)

    @property
    def is_flash(self) -> bool:
        """Whether the implementation has the masks of flash kernels; transformers asks its name."""
        return self.implementation is not None and "flash" in self.implementation

    @property
    def n_keys(self) -> int:
        """The number of keys that are read: some kernels skip the unused end of a static cache."""
        T, S, mask = self.q.shape[2], self.k.shape[2], self.mask
        if isinstance(mask, RuleMask):
            return mask.n_keys
        if self.implementation == NAME and mask is None and self.is_causal:
            return min(S, T)  # aligned top-left: no query sees what comes later in the cache
        is_row = isinstance(mask, Tensor) and mask.ndim == 2
        return min(S, mask.shape[1]) if is_row and self.is_flash else S

    @property
    def fits_operator(self) -> bool:
        """Whether queries, keys, a mask, a bias, sinks and numbers are all that the rule needs."""
        given = {name for name, x in self.arguments.items() if x is not None}
        scale = self.arguments.get("scaling")
        return (
            self.implementation in (None, "eager", "sdpa")
            and given <= _OF_OPERATOR
            and (scale is None or type(scale) is float)
            and all(type(x) in (Tensor, nn.Parameter) for x in (self.q, self.k))
            and (self.mask is None or type(self.mask) is Tensor)
        )

    @property
    def rule_key(self) -> tuple[Any, ...] | None:
        """What the rule follows from besides the mask; None if that is not numbers alone."""
        module, q, k, given = self.module, self.q, self.k, self.arguments
        if self.is_flash or not _RULE_TENSORS.isdisjoint(given):
            return None
        return (
            self.implementation, type(module), getattr(module, "is_causal", True), q.shape, k.shape,
            q.dtype, q.device, given.get("scaling"), given.get("softcap"), given.get("is_causal"),
            given.get("dropout"),
        )  # fmt: skip

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, without the keys that are not read."""
        S = self.n_keys
        if self.k.shape[2] == S:
            return self.q, self.k, self.v
        return self.q, self.k[:, :, :S], self.v[:, :, :S]

    def rule(self) -> AttentionRule:
        """The rule by which the implementation computes weights from these arguments.

        Raises:
            UnsupportedError: `sdpa` leaves an argument out, or the mask cannot be read.
        """
        q, given, S = self.q, self.arguments, self.n_keys
        for name in _LEFT_OUT if self.implementation == "sdpa" else ():
            if given.get(name) is not None:
                raise UnsupportedError(
                    f"observe: {type(self.module).__name__} passes {name}, which 'sdpa' leaves "
                    f"out. Load the model with attn_implementation='eager' or 'headwise'."
                )
        visible, indices = self._visible(S), given.get("indices")
        if indices is not None:
            # Sparse layers put their selection into the mask for `eager` and `sdpa` alone.
            selected = indices.new_zeros(*indices.shape[:2], self.k.shape[2], dtype=torch.bool)
            selected = selected.scatter_(-1, indices.long(), True)[:, None, :, :S]
            if isinstance(visible, Tensor) and visible.is_floating_point():
                visible = visible.masked_fill(~selected, -torch.inf)
            elif isinstance(visible, Tensor):
                visible = visible & selected
            else:
                visible = as_mask(selected) if visible is None else visible & as_mask(selected)
        bias, sinks = given.get("position_bias"), given.get("sinks")
        if bias is not None:  # unless it adds nothing, as in T5's cross-attention
            wide = torch.promote_types(q.dtype, torch.float32)
            bias = None if _holds_zeros(bias) else bias[..., :S].to(wide)
        if bias is not None and self.implementation == NAME:
            # Masks are apart, so that nothing in it hides a key, which takes time to see.
            bias = TensorBias(bias)
        return make_rule(
            head_dim=q.shape[-1], mask=visible, scale=given.get("scaling"), bias=bias,
            softcap=given.get("softcap"), is_added=True,
            sinks=given.get("s_aux") if sinks is None else sinks.squeeze(-1),
        )  # fmt: skip

    def _visible(self, S: int) -> Tensor | Mask | None:
        mask, T = self.mask, self.q.shape[2]
        if self.is_flash and (mask is None or (isinstance(mask, Tensor) and mask.ndim == 2)):
            return self._flash_mask(S)
        if isinstance(mask, RuleMask):
            return mask.rule
        if isinstance(mask, Tensor) and (mask.ndim == 4 or self.implementation == NAME):
            return mask[..., :S]
        if mask is None:
            # Without a mask, sdpa uses its kernel's causal flag; other kernels see every key.
            if self.implementation in ("eager", "flex_attention") or not self.is_causal:
                return None
            return _CAUSAL if T == S else top_left(T, S, self.q.device)
        try:
            return from_flex(mask)
        except MaskError:
            kind = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            raise UnsupportedError(
                f"observe: {type(self.module).__name__} under {self.implementation!r} has a mask "
                f"{kind} that cannot be read. Load the model with attn_implementation='sdpa'."
            ) from None

    def _flash_mask(self, S: int) -> Mask | None:
        """The mask of a flash kernel, from its causal flag, window, padding and packed texts."""
        masks: list[Mask] = [causal()] if self.is_causal else []
        size = self.arguments.get("sliding_window")
        if size is not None and size < S:
            masks.append(window(size - 1))  # transformers counts the query itself
        if self.mask is not None:
            masks.append(as_mask(self.mask.bool()[:, None, None, :], "observe"))
        elif (ids := self._packed(S)) is not None:
            masks.append(documents(ids))
        return reduce(and_, masks) if masks else None

    def _packed(self, S: int) -> Int[Tensor, "1 S"] | None:
        """The number of each key's text in a packed row, from cumulative lengths or positions."""
        ends, positions = self.arguments.get("cu_seq_lens_q"), self.arguments.get("position_ids")
        # As transformers finds out for its flash kernels: lengths if they are given; else positions
        # that start again within the only row of a batch are several texts.
        index = torch.arange(S, device=self.q.device)
        if ends is not None:
            return torch.bucketize(index, ends.to(index), right=True)[None]
        if len(self.q) != 1 or positions is None or positions.shape != (1, S) or S == 1:
            return None
        if torch.equal(positions[0] - positions.min(), index):
            return None
        return (positions == positions.min()).cumsum(-1)

    @property
    def needs_weights(self) -> bool:
        """Whether the model was asked for the weights."""
        return bool(self.arguments.get("output_attentions")) or collects_weights()

    @property
    def is_left_to_torch(self) -> bool:
        """Whether `sdpa` computes this, and the kernel would not do so faster."""
        q, k, v, mask, given = self.q, self.k, self.v, self.mask, self.arguments
        if self.needs_weights:
            return False
        names = _NOT_OF_SDPA.intersection(given)
        if names and any(given[name] is not None for name in names):
            return False
        is_tensor = mask is not None and not isinstance(mask, RuleMask)
        has_tensor = is_tensor or given.get("position_bias") is not None
        if given.get("dropout") or not q.is_cpu or not native_is_faster(q, k, has_tensor):
            return True
        # torch broadcasts texts, and takes masks of two axes; the kernel does neither.
        fits = q.ndim == k.ndim == 4 and q.shape[0] == k.shape[0] and v.shape[:3] == k.shape[:3]
        return not (fits and (mask is None or mask.ndim == 4))

    def heads_by_torch(self) -> Float[Tensor, "B T H Dv"]:
        """The heads by the function of `sdpa`."""
        mask = self.mask.visible() if isinstance(self.mask, RuleMask) else self.mask
        # Without the argument, its function would ask the module alone: `is_causal` knows more.
        given = self.arguments | {"is_causal": mask is None and self.is_causal}
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
        inputs, dropout = autocast_inputs(*self.inputs()), self.arguments.get("dropout") or 0.0
        return AttentionProblem(*inputs, self.rule(), dropout, Extras(weights=needs_weights))


def _holds_zeros(bias: Tensor) -> bool:
    """Whether a bias is known to hold zeros alone."""
    if not bias.numel() or not can_read(bias) or is_traced() or needs_gradient(bias):
        return False
    # Its first entry tells nearly always, and takes no time to read.
    return bias[(0,) * bias.ndim].item() == 0 and not bool(bias.any())
