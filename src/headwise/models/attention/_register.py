"""The kernel under a name that Hugging Face's models are loaded with."""

from headwise.errors import UnsupportedError

NAME = "headwise"


def register_attention() -> None:
    """Let Hugging Face models be loaded with `attn_implementation="headwise"`.

    Then `from_pretrained(..., attn_implementation="headwise")` and
    `model.set_attn_implementation("headwise")` run a model's attention on the kernels of `attend`,
    wherever they are faster than `sdpa`; its other calls, such as those with dropout, stay with
    `sdpa`. Softcap, sinks and position biases are computed too, and `output_attentions=True`
    returns the weights. Models that are loaded otherwise do not change. Calling it again does
    nothing. The name is not saved with a model.

    Raises:
        UnsupportedError: this version of transformers cannot register implementations.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface

        from headwise.models.attention.huggingface import attention_forward, attention_mask
    except ImportError as error:
        raise UnsupportedError(
            f"register_attention: transformers has no attention interface as it is known here "
            f"({error}). Install transformers 5.1 or later."
        ) from error
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)
