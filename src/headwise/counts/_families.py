"""Which projections have a bias, in each family of models: few of their files tell."""

from collections.abc import Mapping
from typing import NamedTuple


class Biases(NamedTuple):
    """The roles that have a bias.

    Attributes:
        always: Those that always have one.
        switch: The field that says whether more have one. None: it is always the same.
        switched: The roles that the switch is about.
        default: What a file without the switch means; None where that cannot be known.
    """

    always: str
    switch: str | None = None
    switched: str = "QKVO"
    default: bool | None = None


LIKE_LLAMA = Biases("", "attention_bias")

_ALL = ("bert", "roberta", "xlm-roberta", "camembert", "electra", "distilbert", "mpnet", "biogpt",
        "xglm", "gpt2", "openai-gpt", "gpt_bigcode", "bloom", "phi", "persimmon")  # fmt: skip
_NONE = ("gptj", "codegen", "mpt", "mistral", "mixtral", "phi3", "exaone4", "headwise")
_LLAMAS = ("llama", "gemma", "gemma2", "gemma3_text", "qwen3", "olmo", "olmo2", "cohere", "granite",
           "smollm3", "modernbert")  # fmt: skip

FAMILIES: Mapping[str, Biases] = {
    **dict.fromkeys(_ALL, Biases("QKVO")),
    **dict.fromkeys(_NONE, Biases("")),
    **dict.fromkeys(_LLAMAS, Biases("", "attention_bias", default=False)),
    "falcon": Biases("", "bias", default=False),
    "glm4": Biases("", "attention_bias", "QKV", default=True),
    "gpt_neo": Biases("O"),
    "gpt_neox": Biases("", "attention_bias", default=True),
    "gpt_oss": Biases("", "attention_bias", default=True),
    "opt": Biases("", "enable_bias", default=True),
    "qwen2": Biases("QKV"),
    "qwen2_moe": Biases("", "qkv_bias", "QKV", default=True),
    "stablelm": Biases("", "use_qkv_bias", "QKV", default=False),
    "starcoder2": Biases("", "use_bias", default=True),
    "vit": Biases("O", "qkv_bias", "QKV", default=True),
}
"""Families by the `model_type` of their files; a test holds each to the model itself."""
