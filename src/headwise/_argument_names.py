"""Arguments as other libraries call them: an error that names ours, and its polarity.

Nothing is done where a call succeeds: names are looked at only after Python has refused them.
"""

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Any, TypeVar, cast

from headwise.errors import UnknownArgumentError

Function = TypeVar("Function", bound=Callable[..., Any])

_BLOCKED = "where True = blocked; here True = may attend"
MASKS = {
    "is_causal": "causal=True (with fewer queries than keys, the last query sees the last key)",
    "attn_mask": "mask=, where True = may attend, as in scaled_dot_product_attention. In "
    "nn.MultiheadAttention True = blocked: give mask=masks.from_blocked(attn_mask)",
    "key_padding_mask": f"mask=masks.from_blocked(key_padding_mask[:, None, None]), {_BLOCKED}",
    "src_key_padding_mask": f"mask=masks.from_blocked(mask[:, None, None]), {_BLOCKED}",
    "attention_mask": "mask=masks.from_binary(attention_mask[:, None, None]), where 1 = may attend",
    "average_attn_weights": "need_weights=True, whose weights are per head; weights.mean(1) "
    "averages them",
    "output_attentions": "need_weights=True",
    "return_attention": "need_weights=True",
    "past_key_value": "cache=KVCache(...) of a layer",
    "past_key_values": "cache=KVCache(...) of a layer",
}
FORWARD = MASKS | {
    **dict.fromkeys(("q", "Q", "queries", "x", "input"), "query=, the first argument"),
    **dict.fromkeys(("k", "K", "keys"), "key=, the second argument"),
    **dict.fromkeys(("v", "V", "values"), "value=, the third argument"),
    "memory": "key=, the second argument",
    "context": "key=, the second argument",
    "kv_cache": "cache=",
    "dropout_p": "dropout= when the layer is made",
    "attn_bias": "mask=, where floats are added to the logits",
}
ATTEND = MASKS | {
    **dict.fromkeys(("Q", "query", "queries"), "q=, the first argument"),
    **dict.fromkeys(("K", "key", "keys"), "k=, the second argument"),
    **dict.fromkeys(("V", "value", "values"), "v=, the third argument"),
    "attn_bias": "bias=, which is added to the logits",
    "dropout": "dropout_p=",
    "enable_gqa": "nothing: k and v may have fewer heads than q",
    "sm_scale": "scale=",
    "softmax_scale": "scale=",
    "window_size": "window=(left, right)",
    "sliding_window": "window=(sliding_window - 1, 0): a query's own key is not counted",
    "logits_soft_cap": "softcap=",
}
LAYER = {
    "embed_dim": "d_model=",
    "hidden_size": "d_model=",
    "n_embd": "d_model=",
    "d_in": "d_model=",
    "num_heads": "n_heads=",
    "n_head": "n_heads=",
    "nhead": "n_heads=",
    "heads": "n_heads=",
    "h": "n_heads=",
    "num_attention_heads": "n_heads=",
    "num_kv_heads": "n_kv_heads=",
    "num_key_value_heads": "n_kv_heads=",
    "d_head": "head_dim=",
    "d_k": "head_dim=",
    "d_v": "v_head_dim=",
    "dropout_p": "dropout=",
    "batch_first": "nothing: inputs are [batch, tokens, width]",
    "qkv_bias": 'bias="qkv"',
    "add_bias_kv": "nothing of this kind: the layer has no learned key; sinks= is the closest",
    "add_zero_attn": "sinks=0.0, which is the same",
    "is_causal": "causal=True when the layer is called",
    "causal": "causal=True when the layer is called",
    "mask": "mask= when the layer is called",
    "device": ".to(device) on the layer",
    "dtype": ".to(dtype) on the layer",
}
PLAN = {
    "amount": "remove=0.3, which removes 30 % of the heads",
    "ratio": "remove=0.3, which removes 30 % of the heads",
    "sparsity": "remove=0.3, which removes 30 % of the heads",
    "pruning_ratio": "remove=0.3, which removes 30 % of the heads",
    "share": "remove=0.3, which removes 30 % of the heads",
    "keep": "remove=, the share of heads to remove: 1 - keep",
    "heads_to_prune": "heads=, such as {5: [3]}",
}
PRUNE = {
    "heads_to_prune": "plan=, the second argument: a plan or heads such as {5: [3]}",
    "heads": "plan=, the second argument: a plan or heads such as {5: [3]}",
    "remove": "plan=hw.plan(scores, remove=...)",
    "amount": "plan=hw.plan(scores, remove=...)",
    "inplace": "nothing: the model stays as it is, and a smaller copy is returned",
}
IMPORTANCE = {
    "texts": "batches=, the second argument: texts with tokenizer=, or batches",
    "dataset": "batches=, the second argument: texts with tokenizer=, or batches",
    "metric": "loss=",
    "n_rounds": "rounds=",
}
LOAD = {
    "torch_dtype": "dtype=",
    "device_map": "device=",
    "trust_remote_code": "nothing: code beside the weights is never run",
}


def suggests(names: Mapping[str, str], *, positional: str = "") -> Callable[[Function], Function]:
    """Make a function's error about an unknown argument suggest the right one.

    The signature stays the same. A call that succeeds costs one more Python frame.

    Args:
        names: What to give instead, by the other name.
        positional: What to do where too many arguments have no name, if not to name them.
    """

    def decorate(function: Function) -> Function:
        @wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            try:
                return function(*arguments, **options)
            except TypeError:
                expected = signature(function)
                if _fits(expected, arguments, options):
                    raise  # an error inside the function
                where = getattr(function, "__qualname__", "").removesuffix(".__init__")
                message = _advice(expected, options, names)
                if message is None:
                    message = _unnamed(expected, len(arguments), positional)
                if not message:
                    raise
                raise UnknownArgumentError(f"{where}: {message}") from None

        return cast(Function, call)

    return decorate


def _fits(expected: Signature, arguments: tuple[Any, ...], options: dict[str, Any]) -> bool:
    try:
        expected.bind(*arguments, **options)
    except TypeError:
        return False
    return True


def _unnamed(expected: Signature, count: int, positional: str) -> str | None:
    """What to do where too many arguments have no name; None if there are not too many."""
    parameters = expected.parameters.values()
    taken = [x.name for x in parameters if x.kind is x.POSITIONAL_OR_KEYWORD]
    named = [x.name for x in parameters if x.kind is x.KEYWORD_ONLY]
    if count <= len(taken):
        return None
    if positional or not named:
        return positional or None
    own = [name for name in taken if name != "self"]
    return (
        f"{count - len(taken) + len(own)} arguments have no name, where only {', '.join(own)} may "
        f"have none. Name the others, as in {named[0]}=."
    )


def _advice(
    expected: Signature, options: Mapping[str, Any], names: Mapping[str, str]
) -> str | None:
    """What is wrong with the first unknown argument, and what to do; None without one."""
    ours = [
        name
        for name, parameter in expected.parameters.items()
        if parameter.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    ]
    for name in options:
        if name in ours:
            continue
        if name in names:
            is_absent = names[name].startswith("nothing")
            problem = "is not needed here" if is_absent else "has another name here"
            return f"{name} {problem}. Give {names[name]}."
        if close := get_close_matches(name, ours, 1):
            return f"there is no argument {name}. Did you mean {close[0]}?"
        listed = ", ".join(other for other in ours if other != "self")
        arguments = f"The arguments are {listed}" if listed else "It takes none"
        return f"there is no argument {name}. {arguments}."
    return None
