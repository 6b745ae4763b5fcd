"""How long `make report` takes once it is installed: `headwise report` in a fresh process.

    python -m benchmarks.speed.report_time --into benchmarks/results/roles-speed.md

The report of a Mini-GPT that is trained first, and once more of the trained one, on all cores and,
with `--one-core`, on one.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks._report import cpu_name, parser_of, show, software, table

WORKS = ("trains a Mini-GPT and studies it", "studies it, trained before")


def main() -> None:
    parser = parser_of(__doc__, rounds=3)
    parser.add_argument("--one-core", action="store_true", help="measure on one core too")
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    counts = {"all cores": len(cores)} | ({"one core": 1} if options.one_core else {})
    seconds: dict[str, list[list[float]]] = {name: [] for name in counts}
    for _ in range(options.rounds):
        for where, rounds in seconds.items():
            rounds.append(list(reports(cores[: counts[where]])))
            print(f"{where}:", *(f"{took:.0f} s" for took in rounds[-1]), file=sys.stderr)
    columns = [map(statistics.median, zip(*rounds, strict=True)) for rounds in seconds.values()]
    rows = [
        [name, *(f"{took // 60:.0f} min {took % 60:.0f} s" for took in row)]
        for name, *row in zip(WORKS, *columns, strict=True)
    ]
    runs = "one run" if options.rounds == 1 else f"medians of {options.rounds} rounds"
    text = (
        f"{software()}, {cpu_name()}, {len(cores)} cores, wall clock, {runs}.\n\n"
        f"{table(('headwise report', *seconds), rows)}"
    )
    show(text, options.into, "report")


def reports(cores: list[int]) -> Iterator[float]:
    """The seconds of a report whose model is trained first, and of a report of that model."""
    with tempfile.TemporaryDirectory() as folder:
        out, lab = Path(folder, "report.html"), Path(folder, "mini-gpt")
        command = [sys.executable, "-m", "headwise", "report", "--force"]
        for _ in WORKS:
            start = time.perf_counter()
            subprocess.run(
                [*command, "--out", str(out), "--lab-folder", str(lab)],
                check=True,
                stdout=subprocess.DEVNULL,
                preexec_fn=lambda: os.sched_setaffinity(0, cores),
                env=os.environ | {"OMP_NUM_THREADS": str(len(cores))},
            )
            yield time.perf_counter() - start


if __name__ == "__main__":
    main()
