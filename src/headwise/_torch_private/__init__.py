"""Every use of PyTorch's private interface, and what may be done to a tensor while it is traced.

No other folder names a private part of torch. Nothing here runs on import without a fallback, so a
new version of torch is met in this folder alone.
"""

from headwise._torch_private._compiler import compiler_stance as compiler_stance
from headwise._torch_private._compiler import excuse_uncompiled_call as excuse_uncompiled_call
from headwise._torch_private._compiler import is_compiler_loaded as is_compiler_loaded
from headwise._torch_private._compiler import is_of_graph as is_of_graph
from headwise._torch_private._compiler import set_compiler_stance as set_compiler_stance
from headwise._torch_private._compiler import (
    side_effects_under_checkpoint as side_effects_under_checkpoint,
)
from headwise._torch_private._compiler import uncompiled_block as uncompiled_block
from headwise._torch_private._interception import FUSED_ATTENTION as FUSED_ATTENTION
from headwise._torch_private._interception import FUSED_FUNCTION as FUSED_FUNCTION
from headwise._torch_private._interception import can_observe_operators as can_observe_operators
from headwise._torch_private._interception import has_function_modes as has_function_modes
from headwise._torch_private._interception import map_leaves as map_leaves
from headwise._torch_private._interception import observe_operators as observe_operators
from headwise._torch_private._interception import operator_observers as operator_observers
from headwise._torch_private._interception import pop_function_mode as pop_function_mode
from headwise._torch_private._interception import push_function_mode as push_function_mode
from headwise._torch_private._interception import (
    stop_observing_operators as stop_observing_operators,
)
from headwise._torch_private._interception import without_function_modes as without_function_modes
from headwise._torch_private._interception import (
    without_operator_observers as without_operator_observers,
)
from headwise._torch_private._interception import (
    without_tensor_subclasses as without_tensor_subclasses,
)
from headwise._torch_private._modules import MODULE_CALL as MODULE_CALL
from headwise._torch_private._modules import WithoutFastPath as WithoutFastPath
from headwise._torch_private._modules import always_call_after as always_call_after
from headwise._torch_private._modules import call_forward_pre_hooks as call_forward_pre_hooks
from headwise._torch_private._modules import compiled_function as compiled_function
from headwise._torch_private._modules import forward_pre_hooks as forward_pre_hooks
from headwise._torch_private._modules import has_forward_hooks as has_forward_hooks
from headwise._torch_private._modules import has_joined_weight as has_joined_weight
from headwise._torch_private._modules import remove_hooks as remove_hooks
from headwise._torch_private._modules import replace_submodule as replace_submodule
from headwise._torch_private._modules import wrapped_by_compiler as wrapped_by_compiler
from headwise._torch_private._names import (
    cpu_multiplies_bfloat16_tiles as cpu_multiplies_bfloat16_tiles,
)
from headwise._torch_private._tracing import Outline as Outline
from headwise._torch_private._tracing import can_read as can_read
from headwise._torch_private._tracing import constant_when_traced as constant_when_traced
from headwise._torch_private._tracing import eager_outline as eager_outline
from headwise._torch_private._tracing import has_readable_values as has_readable_values
from headwise._torch_private._tracing import in_backward as in_backward
from headwise._torch_private._tracing import in_forward_gradient as in_forward_gradient
from headwise._torch_private._tracing import in_func_gradient as in_func_gradient
from headwise._torch_private._tracing import in_func_transform as in_func_transform
from headwise._torch_private._tracing import is_fake as is_fake
from headwise._torch_private._tracing import is_materialized as is_materialized
from headwise._torch_private._tracing import is_plain as is_plain
from headwise._torch_private._tracing import is_traced as is_traced
from headwise._torch_private._tracing import is_traced_by_compiler as is_traced_by_compiler
from headwise._torch_private._tracing import is_under_func_gradient as is_under_func_gradient
from headwise._torch_private._tracing import is_wrapped as is_wrapped
from headwise._torch_private._tracing import mapped_with as mapped_with
from headwise._torch_private._tracing import needs_gradient as needs_gradient
from headwise._torch_private._tracing import statically as statically
from headwise._torch_private._tracing import under_autocast as under_autocast
from headwise._torch_private._tracing import version_of as version_of
