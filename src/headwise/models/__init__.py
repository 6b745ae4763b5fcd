"""Other people's models as a whole: checked, hooked, fingerprinted, and fed with texts.

What is asked of every model is here, and `texts` makes its inputs. Their attention calls, heads and
files have rooms of their own: `capture`, `ownership` and `checkpoints`.
"""

from headwise.models._fingerprint import fingerprint as fingerprint
from headwise.models._hooks import Hooks as Hooks
from headwise.models._hooks import SharedSetting as SharedSetting
from headwise.models._hooks import clear_leftovers as clear_leftovers
from headwise.models._hooks import hooked as hooked
from headwise.models._hooks import ordinary_path as ordinary_path
from headwise.models._hooks import uncompiled as uncompiled
from headwise.models._model import WEIGHTS_FROM as WEIGHTS_FROM
from headwise.models._model import around as around
from headwise.models._model import check_device as check_device
from headwise.models._model import check_model as check_model
from headwise.models._model import check_weights as check_weights
from headwise.models._model import class_of as class_of
from headwise.models._model import copy_model as copy_model
from headwise.models._model import device_of as device_of
from headwise.models._model import is_sentence_transformer as is_sentence_transformer
from headwise.models._model import model_inputs as model_inputs
from headwise.models._model import sentence_embedding as sentence_embedding
from headwise.models._model import transformer_name as transformer_name
from headwise.models._model import weights_from as weights_from
from headwise.models._model import without_adapters as without_adapters
from headwise.models._model import without_compiler as without_compiler
from headwise.models._transformers_private import HEADS as HEADS
from headwise.models._transformers_private import KV_HEADS as KV_HEADS
from headwise.models._transformers_private import QUERIES_PER_KV_HEAD as QUERIES_PER_KV_HEAD
from headwise.models._transformers_private import WIDTHS as WIDTHS
from headwise.models._transformers_private import auto_classes as auto_classes
from headwise.models._transformers_private import cache_argument as cache_argument
from headwise.models._transformers_private import cache_in as cache_in
from headwise.models._transformers_private import first_head_of as first_head_of
from headwise.models._transformers_private import growing_layer as growing_layer
from headwise.models._transformers_private import is_sharded as is_sharded
from headwise.models._transformers_private import leave_uninitialized as leave_uninitialized
from headwise.models._transformers_private import (
    progress_bar_in_terminals_only as progress_bar_in_terminals_only,
)
from headwise.models._transformers_private import trainer_reporters as trainer_reporters
