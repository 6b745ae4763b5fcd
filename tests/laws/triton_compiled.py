"""Compiles the kernel in Triton for a GPU that is not there; run by `test_triton`.

python tests/laws/triton_compiled.py 90
"""

import os
import sys
from dataclasses import replace
from functools import partial
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"

import torch
import triton
from triton.backends.compiler import GPUTarget

from headwise import masks
from headwise.kernels import AttentionProblem, RowReduction, RowRequest, make_rule
from headwise.kernels.triton import TRITON, _launch


class Absent:
    """A driver for a GPU that is not there, which is enough to compile for it."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiling:
    """A kernel, compiled instead of started."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.compiled = kernel, None

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def compile_for(task: Any, **how: int) -> None:
            self.compiled = self.kernel.warmup(task, grid=grid, **how)

        return compile_for


def main() -> None:
    triton.runtime.driver.set_active(Absent(int(sys.argv[1])))
    kernels = Compiling(_launch.describe), Compiling(_launch.receive)
    _launch.describe, _launch.receive = kernels
    T, D = 1024, 64
    q, k, v = (torch.empty(1, n, T, D, dtype=torch.bfloat16) for n in (4, 2, 2))
    plain = make_rule(head_dim=D, is_causal=True)
    apart = masks.padding([T]) & masks.documents(torch.zeros(1, T, dtype=torch.int64))
    given = masks.as_mask(torch.ones(T, T, dtype=torch.bool))
    of_all = {"softcap": 30.0, "sinks": torch.zeros(4), "bias": torch.randn(T, T), "near": (99, 0)}
    watch = {"distance": True, "keys": torch.zeros(1, T, 4, dtype=torch.int64), "heads": True}
    more = {"participation": True, "argmax": True, "classes": torch.ones(1, T, 8)}
    more["received"] = torch.ones(1, T) > 0
    rule, request = make_rule(head_dim=D, mask=apart & given, **of_all), RowRequest(**watch, **more)
    problem = AttentionProblem(q, k, v, plain)
    added = replace(request, heads=False, argmax=False, received=None)
    texts = torch.zeros(1, T, dtype=torch.int64)
    names = ("lse", "max_logit", "max_weight", "sink", "entropy", "participation", "distance")
    numbers = {name: [n] for n, name in enumerate(names)}
    numbers |= {"key_mass": [7, 8, 9, 10], "class_mass": [11]}
    reduction = RowReduction(numbers, 19, torch.ones(1, T) > 0, texts, 1, False)
    works = {
        "heads": partial(TRITON.attend, problem, TRITON.plan(problem, "")),
        "watch": partial(TRITON.statistics, problem, RowRequest(**watch)),
        "everything": partial(TRITON.statistics, problem._replace(rule=rule), request),
        "sums": partial(TRITON.row_sums, problem._replace(rule=rule), added, reduction),
    }
    for name, work in works.items():
        work()
        print(name, max(each.compiled.metadata.shared for each in kernels if each.compiled))


if __name__ == "__main__":
    main()
