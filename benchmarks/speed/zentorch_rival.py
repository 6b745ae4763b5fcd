"""The native kernel beside that of zentorch, AMD's extension of PyTorch for its own processors.

    make build/rivals
    PYTHONPATH=build/rivals python -m benchmarks.speed.zentorch_rival \\
        --into benchmarks/results/rivals.md

Ratios compare with torch's kernel on the same tensors, in the same run, on one thread by the CPU
time of the process. Where zentorch has no kernel of its own for a processor it calls torch's.
"""

from functools import partial
from importlib.metadata import version
from itertools import product

import torch

from benchmarks._report import cpu_name, insert, parser_of, print_rows, rows_of, software, tables
from benchmarks.speed.native import DTYPES, FORWARD, MOST, forward_works, inputs, label, time_works
from headwise._native_library import library

PART = "zentorch"
SHOWN = ("torch", "heads alone", "with lse, entropy, maxima")


def main() -> None:
    import zentorch

    parser = parser_of(__doc__, seconds=10.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    attention = torch.ops.zentorch.zentorch_sdpa
    rows = []
    sizes = [size for size in FORWARD if size[2] <= MOST]
    for dtype, size, causal in product(DTYPES, sizes, (False, True)):
        works = forward_works(size, causal, DTYPES[dtype])
        q, k, v = (x.to(DTYPES[dtype]) for x in inputs(*size))
        works = {name: works[name] for name in SHOWN} | {
            "zentorch": partial(attention, q, k, v, is_causal=causal)
        }
        case = {"table": f"Forward, {dtype}", "texts, heads, tokens, width": label(size)}
        case["mask"] = "causal" if causal else "none"
        with torch.no_grad():
            rows += print_rows(rows_of(case, time_works(works, options), "torch"))
    where = (
        f"zentorch {version('zentorch')}, {software()}, native kernel "
        f"{library().name}, {cpu_name()}, one thread, CPU time."
    )
    text = "\n\n".join([where, *tables(rows)]).replace("## ", "### ")
    print(zentorch.__name__, text)
    if options.into:
        insert(text, options.into, PART)


if __name__ == "__main__":
    main()
