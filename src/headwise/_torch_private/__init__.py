"""Every use of PyTorch's private interface, and what may be done to a tensor while it is traced.

No other folder names a private part of torch. Nothing here runs on import without a fallback, so a
new version of torch is met in this folder alone.
"""

from headwise._torch_private._function_modes import (
    has_function_modes,
    map_leaves,
    pop_function_mode,
    push_function_mode,
    without_function_modes,
    without_tensor_subclasses,
)
from headwise._torch_private._kernels import (
    cpu_multiplies_bfloat16_tiles,
    flash_on_cpu,
    fused_kernel_of,
)
from headwise._torch_private._modules import (
    WithoutFastPath,
    call_forward_pre_hooks,
    compiled_modules,
    forward_pre_hooks,
    has_joined_weight,
    replace_submodule,
    wrapped_by_compiler,
)
from headwise._torch_private._operators import (
    FUSED_ATTENTION,
    can_observe_operators,
    observe_operators,
    stop_observing_operators,
    without_operator_observers,
)
from headwise._torch_private._tracing import (
    can_read,
    constant_when_traced,
    has_readable_values,
    in_backward,
    in_forward_gradient,
    in_func_gradient,
    in_func_transform,
    is_compiler_loaded,
    is_eager,
    is_fake,
    is_materialized,
    is_plain,
    is_traced,
    is_under_func_gradient,
    is_wrapped,
    mapped_with,
    needs_gradient,
    statically,
    version_of,
)

__all__ = [
    "FUSED_ATTENTION",
    "WithoutFastPath",
    "call_forward_pre_hooks",
    "can_observe_operators",
    "can_read",
    "compiled_modules",
    "constant_when_traced",
    "cpu_multiplies_bfloat16_tiles",
    "flash_on_cpu",
    "forward_pre_hooks",
    "fused_kernel_of",
    "has_function_modes",
    "has_joined_weight",
    "has_readable_values",
    "in_backward",
    "in_forward_gradient",
    "in_func_gradient",
    "in_func_transform",
    "is_compiler_loaded",
    "is_eager",
    "is_fake",
    "is_materialized",
    "is_plain",
    "is_traced",
    "is_under_func_gradient",
    "is_wrapped",
    "map_leaves",
    "mapped_with",
    "needs_gradient",
    "observe_operators",
    "pop_function_mode",
    "push_function_mode",
    "replace_submodule",
    "statically",
    "stop_observing_operators",
    "version_of",
    "without_function_modes",
    "without_operator_observers",
    "without_tensor_subclasses",
    "wrapped_by_compiler",
]
