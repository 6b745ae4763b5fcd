"""Find planted writers and cancellers in many models: `python tests/soak/writers.py DRAWS PAGE`.

Each draw has two layers of five heads, of which four are planted, and 40 examples, of which half
choose directions.
"""

import sys
from pathlib import Path

from benchmarks._report import insert, table
from planted_writers import KINDS, discoveries


def main(draws: int, page: Path) -> None:
    found = discoveries(draws)
    rows = [
        [f"of {draws * len(KINDS)} planted heads, found with their kind", f"{found['recall']:.1%}"],
        ["of the heads that are found, not planted or of another kind", f"{found['false']:.1%}"],
        [f"of {draws} models with answers exchanged at random, any head is found",
         f"{found['alarms']:.1%}"],
    ]  # fmt: skip
    insert(table(("what", "share"), rows), page, "planted writers")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
