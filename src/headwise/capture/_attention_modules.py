"""What the modules of a model say about themselves: whether and how they attend."""

from torch import nn

from headwise.layer import HeadAttention
from headwise.models import HEADS

# Layers with a plain hook of their own: what they call in turn is not captured.
HOOKED = (HeadAttention, nn.MultiheadAttention)
# Parts of the names of cross-attention and of self-attention modules.
_CROSS = ("cross", "encoder_attn", "encdec")
_SELF = "self"


def is_attention(module: nn.Module) -> bool:
    """Whether a module is an attention module, according to its class."""
    name = type(module).__name__.lower()
    known = isinstance(module, nn.MultiheadAttention | HeadAttention)
    return known or "attention" in name or "attn" in name


def n_heads_of(module: nn.Module) -> int:
    """The number of heads that a module declares; 1 if it declares none."""
    counts = [getattr(module, name, None) for name in (*HEADS, "nhead")]
    return next((count for count in counts if isinstance(count, int) and count > 0), 1)


def cross_by_name(module_name: str) -> bool | None:
    """Whether a module is cross-attention; None if its name does not say."""
    for part in reversed(module_name.lower().split(".")):
        is_cross = any(word in part for word in _CROSS)
        if is_cross or (_SELF in part and part != _SELF):  # BERT's cross-attention has a "self"
            return is_cross
    return None
