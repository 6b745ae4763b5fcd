"""QK-clip: bounds the attention logits of every head during training."""

from headwise.monitor.clip._qk_clip import QKClip
from headwise.monitor.clip._reports import ClippedHead, ClipReport

__all__ = ["ClipReport", "ClippedHead", "QKClip"]
