"""The native kernel's shared object: which one this processor runs best, and its interface.

No torch is imported here, so that this is cheap to import.
"""

import ctypes
import os
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path

BUILT = Path(__file__).parent / "kernels" / "native" / "lib"
# The instruction sets that kernels are built for, the largest first.
SETS = ("amx", "avx512bf16", "avx512", "avx2", "neon")
# Set to 0 for no native kernel, to the name of one of them, or to the path of another build.
SWITCH = "HEADWISE_NATIVE"
NOT_BUILT = (
    "none was built with this installation, because there is no C++ compiler or it failed: "
    "`pip install --verbose` shows which"
)
INTERFACE = 8
# What a function may return.
DONE, NO_MEMORY, NOT_FINITE = 0, 1, 2

_Strides2, _Strides3 = ctypes.c_int64 * 2, ctypes.c_int64 * 3


class Problem(ctypes.Structure):
    """The input and output of the kernel: `source/interface.h`, field by field.

    A field that is left out is null or 0. A library whose fields lie elsewhere is not loaded.
    """

    __slots__ = ()  # no attribute but the fields: the kernel would never see it
    _fields_ = (
        ("dtype", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("q", "k", "v")),
        *((name, _Strides3) for name in ("q_stride", "k_stride", "v_stride")),
        *((name, ctypes.c_int64) for name in ("B", "H", "Hkv", "T", "S", "D", "Dv", "packed")),
        *((name, ctypes.c_double) for name in ("scale", "softcap")),
        *((name, ctypes.c_int64) for name in ("left", "right")),
        *((name, ctypes.c_void_p) for name in ("key_range", "documents")),
        *(("mask", ctypes.c_void_p), ("mask_stride", _Strides3)),
        *(("bias", ctypes.c_void_p), ("bias_stride", _Strides3)),
        *(("by_distance", ctypes.c_void_p), ("by_distance_stride", _Strides2)),
        ("sinks", ctypes.c_void_p),
        *(("heads", ctypes.c_void_p), ("heads_stride", _Strides3)),
        *((name, ctypes.c_void_p) for name in ("n_keys", "argmax", "lse", "max_logit")),
        *((name, ctypes.c_void_p) for name in ("max_weight", "entropy", "participation", "sink")),
        *((name, ctypes.c_void_p) for name in ("distance", "even_distance")),
        *((name, ctypes.c_void_p) for name in ("query_at", "key_at")),
        *(("N", ctypes.c_int64), ("keys", ctypes.c_void_p)),
        *((name, ctypes.c_void_p) for name in ("key_mass", "key_top", "key_share", "key_seen")),
        *(("C", ctypes.c_int64), ("classes", ctypes.c_void_p)),
        *((name, ctypes.c_void_p) for name in ("class_mass", "class_top", "class_share")),
        *((name, ctypes.c_void_p) for name in ("class_keys", "key_norms")),
        *((name, ctypes.c_void_p) for name in ("counted", "received")),
        *((name, ctypes.c_void_p) for name in ("grad_heads", "grad_lse", "grad_entropy")),
        ("grad_heads_stride", _Strides3),
        *((name, ctypes.c_void_p) for name in ("dq", "dk", "dv")),
        *((name, _Strides3) for name in ("dq_stride", "dk_stride", "dv_stride")),
        ("threads", ctypes.c_int64),
    )


class _Field(ctypes.Structure):
    """A field of a problem as the compiler has laid it out."""

    _fields_ = (("name", ctypes.c_char_p), *((name, ctypes.c_int64) for name in ("offset", "size")))


Layout = dict[str, tuple[int, int]]  # offset and size of each field, in bytes


@dataclass(frozen=True, eq=False)
class Library:
    """A loaded kernel, or the reason why there is none."""

    name: str  # of the instruction set; "none"
    why: str
    functions: ctypes.CDLL | None = None

    def __bool__(self) -> bool:
        return self.functions is not None

    @property
    def is_outrun(self) -> bool:
        """Whether this processor runs the build for a smaller instruction set faster."""
        return self.functions is not None and bool(self.functions.headwise_is_outrun_here())


@cache
def library() -> Library:
    """The fastest kernel that was built for this processor. The result is cached."""
    setting = os.environ.get(SWITCH, "")
    reason = f"asked for by {SWITCH}={setting}"
    if setting == "0":
        return Library("none", f"switched off by {SWITCH}=0")
    if setting.endswith(".so"):
        return open_library(Path(setting).absolute(), reason)
    if setting not in ("", *SETS):
        known = ", ".join(("0", *SETS))
        return Library("none", f"{SWITCH}={setting} is not one of {known}, nor the path of a .so")
    if setting:
        return _built(setting, reason)
    best = Library("none", NOT_BUILT)
    for name in SETS:
        if (BUILT / f"{name}.so").is_file():
            candidate = _built(name, "the fastest that was built for this processor")
            if candidate and not candidate.is_outrun:
                return candidate
            best = best or candidate
    return best


def _built(name: str, why: str) -> Library:
    path = BUILT / f"{name}.so"
    if not path.is_file():
        return Library("none", f"{name} was not built with this installation")
    return open_library(path, why)


def open_library(path: Path, why: str = "opened by its path") -> Library:
    """The kernel in a file, if it fits this processor and this version of its interface."""
    try:
        functions = ctypes.CDLL(str(path))
        interface, runs = functions.headwise_interface, functions.headwise_runs_here
        is_outrun = functions.headwise_is_outrun_here
    except (OSError, AttributeError, ValueError) as error:  # ValueError: a name with a NUL
        return Library("none", f"{path.name} cannot be loaded: {error}")
    interface.restype = runs.restype = is_outrun.restype = ctypes.c_int64
    if interface() != INTERFACE << 32 | ctypes.sizeof(Problem) or layout_of(functions) != LAYOUT:
        return Library("none", f"{path.name} was built from other sources; build it again")
    if not runs():
        return Library("none", f"{path.name} is not for this processor ({platform.machine()})")
    for name in ("headwise_forward", "headwise_backward"):
        function = getattr(functions, name)
        function.argtypes, function.restype = [ctypes.POINTER(Problem)], ctypes.c_int64
    heads = functions.headwise_heads
    heads.argtypes = [ctypes.POINTER(Problem), *[ctypes.c_void_p] * 4, ctypes.c_int64]
    heads.restype = ctypes.c_int64
    return Library(path.stem, why, functions)


LAYOUT: Layout = {
    name: (getattr(Problem, name).offset, getattr(Problem, name).size)
    for name, *_ in Problem._fields_
}


def layout_of(functions: ctypes.CDLL) -> Layout:
    """Where the compiler has put each field of a problem."""
    list_fields, count = functions.headwise_fields, ctypes.c_int64()
    list_fields.argtypes = [ctypes.POINTER(ctypes.c_int64)]
    list_fields.restype = ctypes.POINTER(_Field)
    fields = list_fields(ctypes.byref(count))[: count.value]
    return {field.name.decode(): (field.offset, field.size) for field in fields}
