"""Write the results of `make soak` into a page: `python tests/soak/page.py FOLDER PAGE`.

Those that the page shows are in `tests/soak/results`.
"""

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks._report import insert, table

Results = Mapping[str, Mapping[str, Any]]


def kills_table(tallies: Results) -> str:
    rows = [
        # Files that nothing names yet are no new result.
        [name, x["kills"], x["in_writes"], x["old"] + x.get("unreadable", 0), x["new"],
         len(x["problems"])]
        for name, x in tallies.items()
    ]  # fmt: skip
    titles = ("verb", "kills", "in a write", "old result left", "new result left", "problems")
    return table(titles, [_as_texts(row) for row in (*rows, _total(rows))])


def fuzz_table(outcomes: Results) -> str:
    rows = [
        [name, x["inputs"], x["loaded"], x["refused"], len(x["problems"]), x["megabytes"]]
        for name, x in sorted(outcomes.items())
    ]
    total = [*_total(rows)[:-1], max(row[-1] for row in rows)]
    titles = ("loader", "broken files", "read", "refused", "problems", "memory, MB")
    return table(titles, [_as_texts(row) for row in (*rows, total)])


def steady_table(runs: Results) -> str:
    rows = [
        [
            name, x["minutes"], x["passes"], "equal" if x["counts_equal"] else "different",
            f"{x['difference']:.0e}", "equal" if x["maximum_equal"] else "different",
            f"{x['megabytes_first']:.1f}", f"{x['megabytes_last']:.1f}",
        ]
        for name, x in runs.items()
    ]  # fmt: skip
    titles = (
        "watched", "minutes", "passes", "counts", "largest difference of a mean", "maxima",
        "MB after a tenth", "MB at the end",
    )  # fmt: skip
    return table(titles, [_as_texts(row) for row in rows])


def _total(rows: list[list[Any]]) -> list[Any]:
    return ["all", *(sum(column) for column in list(zip(*rows, strict=True))[1:])]


def _as_texts(row: Iterable[Any]) -> list[str]:
    return [
        f"{x:,.1f}" if isinstance(x, float) else f"{x:,}" if isinstance(x, int) else x for x in row
    ]


def main(folder: Path, page: Path) -> None:
    read = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    if "kills" in read:
        insert(kills_table(read["kills"]), page, "kills")
    if "fuzz" in read:
        insert(fuzz_table(read["fuzz"]), page, "broken files")
    if runs := {name: read[name] for name in ("training", "decoding") if name in read}:
        insert(steady_table(runs), page, "soak")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
