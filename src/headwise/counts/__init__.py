"""Parameters, multiply-adds and cache bytes of attention, counted from sizes alone."""

from headwise.counts._config import read_config
from headwise.counts._count import count
from headwise.counts._presets import PRESETS
from headwise.counts._sizes import BYTES, LayerSizes, ModelSizes, layer_sizes

__all__ = ["BYTES", "PRESETS", "LayerSizes", "ModelSizes", "count", "layer_sizes", "read_config"]
