"""Which projections have a bias in each family of models; few configuration files say so."""

from collections.abc import Mapping
from typing import NamedTuple


class Biases(NamedTuple):
    """The projections of a family that have a bias, by role: Q, K, V, O."""

    always: str
    switch: str | None = None  # the field that decides whether further roles have one
    switched: str = "QKVO"
    default: bool = False  # the value of that field in a file without it


_ALL = ("bert", "roberta", "xlm-roberta", "camembert", "electra", "distilbert", "mpnet", "biogpt",
        "xglm", "gpt2", "openai-gpt", "gpt_bigcode", "bloom", "phi", "persimmon")  # fmt: skip
_NONE = ("gptj", "codegen", "mpt", "mistral", "mixtral", "phi3", "exaone4", "headwise")
_LLAMAS = ("llama", "llama4_text", "gemma", "gemma2", "gemma3_text", "vaultgemma", "qwen3",
           "qwen3_moe", "qwen3_vl_text", "olmo", "olmo2", "olmo3", "olmoe", "cohere", "cohere2",
           "granite", "granitemoe", "smollm3", "modernbert", "eurobert", "apertus", "arcee",
           "bitnet", "nanochat", "phimoe")  # fmt: skip

ENCODERS = frozenset(
    ("bert", "roberta", "xlm-roberta", "camembert", "electra", "distilbert", "mpnet", "modernbert",
     "eurobert", "vit")
)  # fmt: skip
"""Families whose queries see every key at once, and which so have no cache."""

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
"""Families by their `model_type`. A test compares the count of each with a real model."""


# Key/value heads, and the width of a head where it is not the usual one, by families.
_SIZES: Mapping[str, tuple[int, ...]] = {
    "exaone4 qwen2 stablelm": (32,),
    "qwen3 qwen3_vl_text": (32, 128),
    "mistral mixtral phimoe": (8,),
    "gemma2 gemma3_text vaultgemma": (4, 256),
    "qwen3_moe smollm3": (4,),
    "glm glm4": (2, 128),
    "bitnet": (5,),
    "gemma": (16, 256),
    "gpt_oss": (8, 64),
    "helium": (20, 128),
    "llama4_text": (8, 128),
    "qwen2_moe": (16,),
    "starcoder2": (2,),
}
OMITTED: Mapping[str, Mapping[str, int | bool]] = {
    "falcon": {"multi_query": True},
    "gpt_bigcode": {"multi_query": True},
    **{
        family: dict(zip(("num_key_value_heads", "head_dim"), sizes, strict=False))
        for families, sizes in _SIZES.items()
        for family in families.split()
    },
}
"""The values of fields that a file omits, where they are not the usual ones (as many key/value
heads as heads, `head_dim = d_model / n_heads`). A test compares them with transformers' models.
"""
