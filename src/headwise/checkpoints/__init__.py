"""Checkpoints: one reader of every model, and one writer, for every format."""

from headwise.checkpoints._formats import prepare as prepare
from headwise.checkpoints._fresh_process import SENTENCES as SENTENCES
from headwise.checkpoints._load import load as load
from headwise.checkpoints._load import load_processor as load_processor
from headwise.checkpoints._load import load_tokenizer as load_tokenizer
from headwise.checkpoints._manifest import compose_heads as compose_heads
from headwise.checkpoints._manifest import originals_of as originals_of
from headwise.checkpoints._manifest import set_original_heads as set_original_heads
from headwise.checkpoints._resize import CONFIG_PREFIX as CONFIG_PREFIX
from headwise.checkpoints._resize import BiasHeads as BiasHeads
from headwise.checkpoints._resize import LayerConfig as LayerConfig
from headwise.checkpoints._resize import is_bias_table as is_bias_table
from headwise.checkpoints._resize import returns_biases as returns_biases
from headwise.checkpoints._resize import set_count as set_count
from headwise.checkpoints._resize import update_sizes as update_sizes
from headwise.checkpoints._save import choose_format as choose_format
from headwise.checkpoints._save import save as save
from headwise.checkpoints._source_files import source_files as source_files
from headwise.checkpoints._torch_layer import TorchCompatibleAttention as TorchCompatibleAttention
from headwise.checkpoints._torch_layer import replace_torch_layers as replace_torch_layers
from headwise.checkpoints._torch_layer import update_heads as update_heads
