"""Results of benchmarks: rows, Markdown tables, the machine, and peak memory."""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import date
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from benchmarks._timing import CLOCKS, Times, kernels_of
from headwise.kernels import attend

Row = dict[str, Any]
MEASURED = ("who", "took", "ratio", "rounds")
# Where these are set, freed memory is returned at once: a peak counts what is in use alone.
ONLY_LIVE = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
BEGIN, END = "<!-- measured -->", "<!-- end of what was measured -->"


def rows_of(case: Row, times: Times, base: str) -> Iterator[Row]:
    """A row for each work: its median time, and its ratio to `base`."""
    for name, seconds in times.seconds.items():
        ratio = "1" if name == base else str(times.ratio(name, base))
        took = f"{times.median(name):.2f} ms"
        yield case | {"who": name, "took": took, "ratio": ratio, "rounds": len(seconds)}


def best_of(case: Row, times: Times, ours: str) -> Row:
    """A row for the ratio of `ours` to the peer whose median is the least, in the same rounds."""
    best = min((name for name in times.seconds if not name.startswith(ours)), key=times.median)
    peer = {"took": f"{times.median(best):.2f} ms", "rounds": len(times.seconds[best])}
    return (
        case | peer | {"who": f"{ours} / best peer", "ratio": f"{times.ratio(ours, best)}, {best}"}
    )


def print_rows(rows: Iterable[Row]) -> list[Row]:
    """Collect the rows, printing each as soon as it is measured."""
    printed = []
    for row in rows:
        print(*row.values(), sep="; ", file=sys.stderr, flush=True)
        printed.append(row)
    return printed


def tables(rows: list[Row]) -> Iterator[str]:
    """A table for each title: a line per case, a column per variant.

    The column of the base shows its time or size, the others their ratio to it.
    """
    for title in dict.fromkeys(row["table"] for row in rows):
        frame = pd.DataFrame([row for row in rows if row["table"] == title])
        frame["cell"] = frame["took"].where(frame["ratio"] == "1", frame["ratio"])
        case = [name for name in frame if name not in ("table", "cell", *MEASURED)]
        lines = {
            key: part.set_index("who")["cell"] for key, part in frame.groupby(case, sort=False)
        }
        wide = pd.DataFrame(lines).T.reindex(columns=frame["who"].unique()).fillna("")
        yield f"## {title}\n\n{_markdown(wide.rename_axis(case).reset_index())}"


def _markdown(frame: pd.DataFrame) -> str:
    cells = [list(frame.columns), ["---"] * frame.shape[1], *frame.astype(str).to_numpy().tolist()]
    return "\n".join("| " + " | ".join(line) + " |" for line in cells)


def table(titles: Sequence[str], rows: Sequence[Sequence[str]], left_columns: int = 1) -> str:
    """A Markdown table; its first `left` columns are aligned to the left."""
    marks = [":--" if column < left_columns else "--:" for column in range(len(titles))]
    cells = [[str(cell).replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in (titles, marks, *cells))


def titled(parts: Iterable[tuple[str, str]]) -> str:
    """Texts one after another, each below its title."""
    return "\n\n".join(f"**{title}**\n\n{text}" for title, text in parts)


# Options that several benchmarks have.
OPTIONS: dict[str, dict[str, Any]] = {
    "--threads": {"type": int},
    "--device": {},
    "--clock": {"choices": tuple(CLOCKS)},
    "--seconds": {"type": float, "help": "of a line or a table"},
    "--rounds": {"type": int},
    "--json": {"help": "a file for the rows"},
    "--into": {"help": "a page whose tables are replaced"},
}


def parser_of(doc: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """A parser with `--into`, and with each option that has a default here."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.set_defaults(device="cpu", clock="cpu", threads=1)
    for name in ("into", *defaults):
        option = f"--{name}"
        parser.add_argument(option, **OPTIONS[option], default=defaults.get(name))
    return parser


def numbers(text: str) -> tuple[int, ...]:
    """Whole numbers between commas, as an option has them."""
    return tuple(map(int, text.split(",")))


def publish(
    rows: list[Row], where: str, page: str | None, file: str | None = None, part: str = ""
) -> None:
    """Print the tables; write them into a part of `page`, and the rows into `file`, if given."""
    titled = (f"#{text}" if part else text for text in tables(rows))
    text = "\n\n".join([f"{where}.", *titled])
    if file:
        Path(file).write_text(json.dumps({"machine": where, "rows": rows}, indent=1), "utf-8")
    show(text, page, part)


def show(text: str, page: str | Path | None, part: str = "") -> None:
    """Print a text, and write it into a part of `page`, if one is given."""
    print(text)
    if page:
        insert(text, page, part)


def insert(text: str, page: str | Path, part: str = "") -> None:
    """Replace the text between the two marks of a page, or of a part of it."""
    begin = f"<!-- measured: {part} -->" if part else BEGIN
    before, remainder = Path(page).read_text("utf-8").split(begin)
    _, after = remainder.split(END, 1)
    Path(page).write_text(f"{before}{begin}\n\n{text}\n\n{END}{after}", "utf-8")


def machine(options: argparse.Namespace) -> str:
    """Versions and date, the processor by name, the clock, and the kernel that torch takes."""
    q = torch.randn(1, 4, 256, 64, device=options.device)
    causal = partial(attend, q, q, q, causal=True, backend="fused")
    device = torch.cuda.get_device_name() if options.device == "cuda" else cpu_name()
    threads = f"{options.threads} thread{'' if options.threads == 1 else 's'}"
    return (
        f"{software()}, {threads}, {device} "
        f"({torch.backends.cpu.get_cpu_capability()}), {options.clock} clock; "
        f"torch's kernel: {kernels_of(causal)}"
    )


def software() -> str:
    """What was measured, and when."""
    return f"headwise {version('headwise')}, torch {torch.__version__}, {date.today()}"


def cpu_name() -> str:
    """The CPU's name, where the system tells it, and what it has to multiply bfloat16 with."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.is_file() else []
    fields = {key.strip(): value.strip() for key, _, value in (x.partition(":") for x in lines)}
    flags = fields.get("flags", "").split()
    products = [flag for flag in ("avx512_bf16", "amx_bf16") if flag in flags]
    name = fields.get("model name", "a CPU")
    return f"{name} with {' and '.join(products)}" if products else name


def peak_of(work: Callable[[], object]) -> int:
    """Peak memory of `work` in bytes, on top of the memory in use before; Linux only."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _process_memory("VmRSS")
    work()
    return _process_memory("VmHWM") - before


def in_process(module: str, *arguments: object) -> int:
    """The last number that a benchmark prints in a process of its own."""
    command = [sys.executable, "-W", "ignore", "-m", module, *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env=os.environ | ONLY_LIVE
    )
    return int(done.stdout.splitlines()[-1])


def _process_memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(field))
    return 1024 * int(line.split()[1])
