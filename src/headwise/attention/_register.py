"""The kernel under a name that Hugging Face's models are loaded with."""

from torch import nn

from headwise._display import first_line
from headwise._extras import require
from headwise.attention._rule_mask import NAME
from headwise.errors import ArgumentError, UnsupportedError


def register_attention() -> None:
    """Let Hugging Face models be loaded with `attn_implementation="headwise"`.

    Then `from_pretrained(..., attn_implementation="headwise")` and
    `model.set_attn_implementation("headwise")` run a model's attention on the kernels of `attend`,
    wherever they are faster than `sdpa`; its other calls, such as those with dropout, stay with
    `sdpa`. Softcap, sinks and position biases are computed too, and `output_attentions=True`
    returns the weights. Models that are loaded otherwise do not change. Calling it again does
    nothing. The name is not saved with a model.

    Raises:
        MissingPackageError: transformers is not installed.
        UnsupportedError: this version of transformers cannot register implementations.
    """
    require("transformers", "hf", "register_attention")
    try:
        from transformers import AttentionInterface, AttentionMaskInterface

        from headwise.attention.huggingface import attention_forward, attention_mask
    except ImportError as error:
        raise UnsupportedError(
            f"register_attention: this version of transformers has another attention interface "
            f"({error}). Install transformers 5.1 or later."
        ) from error
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)


def set_attention(model: nn.Module, implementation: str) -> None:
    """Choose what computes the attention of a loaded model; "headwise" is registered first.

    Raises:
        ArgumentError: there is no such implementation, or the model cannot use it.
        UnsupportedError: the model does not let its attention be chosen.
    """
    transformers = require("transformers", "hf", "load")
    if implementation == NAME:
        register_attention()
    known = ["eager", *transformers.AttentionInterface().valid_keys()]
    if implementation not in known:
        raise ArgumentError(
            f"load: attn_implementation={implementation!r} is not known. "
            f"Choose one of {', '.join(sorted({*known, NAME}))}."
        )
    base = transformers.PreTrainedModel
    if not isinstance(model, base):
        if implementation != NAME:  # models of this library always run on its kernels
            raise ArgumentError(
                f"load: {type(model).__name__} computes its attention by headwise.attend, not by "
                f"{implementation!r}. Leave attn_implementation out."
            )
        return
    for part in model.modules():
        if isinstance(part, base) and not part._can_set_attn_implementation():
            raise UnsupportedError(
                f"load: {type(part).__name__} does not call its attention through the interface of "
                f"transformers. Leave attn_implementation out. If the model calls "
                f"scaled_dot_product_attention, use headwise.fast_attention(model)."
            )
    try:
        model.set_attn_implementation(implementation)
    except (ValueError, ImportError) as error:
        raise ArgumentError(
            f"load: {type(model).__name__} cannot use attn_implementation={implementation!r} "
            f"({first_line(error)}). Leave it out."
        ) from error
