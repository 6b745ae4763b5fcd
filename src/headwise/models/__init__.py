"""Other people's models: open them, find their heads, capture their attention calls.

What concerns a model as a whole is here. Texts as its inputs, changes of its heads and its files
have doors of their own: `texts`, `ownership` and `checkpoints`.
"""

from headwise.models._fast_attention import fast_attention
from headwise.models._fingerprint import fingerprint
from headwise.models._head_cache import CacheLayer, find_cache_layers, head_cache
from headwise.models._hooks import Hooks, hooked
from headwise.models._libraries import cache_argument, cache_in, growing_layer
from headwise.models._model import (
    around,
    check_device,
    check_model,
    check_weights,
    device_of,
    is_compiled,
    is_sentence_transformer,
    model_inputs,
    run_uncompiled,
    sentence_embedding,
    without_compiler,
)
from headwise.models.attention import register_attention
from headwise.models.capture import (
    AttentionCall,
    Capture,
    InputTracker,
    ModuleCall,
    Site,
    StackInputs,
    Text,
    capture_calls,
    open_capture,
)
from headwise.models.checkpoints import load, load_tokenizer, save
from headwise.models.ownership import ablate

__all__ = [
    "AttentionCall",
    "CacheLayer",
    "Capture",
    "Hooks",
    "InputTracker",
    "ModuleCall",
    "Site",
    "StackInputs",
    "Text",
    "ablate",
    "around",
    "cache_argument",
    "cache_in",
    "capture_calls",
    "check_device",
    "check_model",
    "check_weights",
    "device_of",
    "fast_attention",
    "find_cache_layers",
    "fingerprint",
    "growing_layer",
    "head_cache",
    "hooked",
    "is_compiled",
    "is_sentence_transformer",
    "load",
    "load_tokenizer",
    "model_inputs",
    "open_capture",
    "register_attention",
    "run_uncompiled",
    "save",
    "sentence_embedding",
    "without_compiler",
]
