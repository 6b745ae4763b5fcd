"""Which projections have a bias, in each family of models: few of their files tell."""

from collections.abc import Mapping
from typing import NamedTuple


class Biases(NamedTuple):
    """The roles that have a bias.

    Attributes:
        always: Those that always have one.
        switch: The field that says whether more have one. None: it is always the same.
        switched: The roles that the switch is about.
        default: What a file without the switch means.
    """

    always: str
    switch: str | None = None
    switched: str = "QKVO"
    default: bool = False


_ALL = ("bert", "roberta", "xlm-roberta", "camembert", "electra", "distilbert", "mpnet", "biogpt",
        "xglm", "gpt2", "openai-gpt", "gpt_bigcode", "bloom", "phi", "persimmon")  # fmt: skip
_NONE = ("gptj", "codegen", "mpt", "mistral", "mixtral", "phi3", "exaone4", "headwise")
_LLAMAS = ("llama", "llama4_text", "gemma", "gemma2", "gemma3_text", "vaultgemma", "qwen3",
           "qwen3_moe", "qwen3_vl_text", "olmo", "olmo2", "olmo3", "olmoe", "cohere", "cohere2",
           "granite", "granitemoe", "smollm3", "modernbert", "eurobert", "apertus", "arcee",
           "bitnet", "nanochat", "phimoe")  # fmt: skip

FAMILIES: Mapping[str, Biases] = {
    **dict.fromkeys(_ALL, Biases("QKVO")),
    **dict.fromkeys(_NONE, Biases("")),
    **dict.fromkeys(_LLAMAS, Biases("", "attention_bias")),
    "falcon": Biases("", "bias"),
    "glm": Biases("", "attention_bias", "QKV", default=True),
    "glm4": Biases("", "attention_bias", "QKV", default=True),
    "gpt_neo": Biases("O"),
    "gpt_neox": Biases("", "attention_bias", default=True),
    "gpt_oss": Biases("", "attention_bias", default=True),
    "helium": Biases("", "attention_bias", "QKV"),
    "opt": Biases("", "enable_bias", default=True),
    "qwen2": Biases("QKV"),
    "qwen2_moe": Biases("", "qkv_bias", "QKV", default=True),
    "stablelm": Biases("", "use_qkv_bias", "QKV"),
    "starcoder2": Biases("", "use_bias", default=True),
    "vit": Biases("O", "qkv_bias", "QKV", default=True),
}
"""Families by the `model_type` of their files. A test holds the count of each to its model."""
