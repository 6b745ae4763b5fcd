"""Parameters, multiply-adds and cache bytes of attention, counted from sizes alone."""

from headwise.counts._config import read_config
from headwise.counts._sizes import BYTES, PRESETS, LayerSizes, ModelSizes, count, layer_sizes

__all__ = ["BYTES", "PRESETS", "LayerSizes", "ModelSizes", "count", "layer_sizes", "read_config"]
