"""Print the lowest version that pyproject.toml allows of each package, as pip reads them.

torch and triton are left out: the tests run with the version of torch that constraints.txt pins.
"""

import re
import tomllib
from pathlib import Path

PROJECT = tomllib.loads(Path("pyproject.toml").read_text("utf-8"))["project"]
EXTRAS = ("hf", "cli", "report", "plot")


def floors() -> dict[str, str]:
    """The lower bound of each package, by its name."""
    extras = PROJECT["optional-dependencies"]
    requirements = PROJECT["dependencies"] + [line for name in EXTRAS for line in extras[name]]
    bounds = (re.match(r"([\w-]+)>=([\w.]+)", line) for line in requirements)
    found = {bound[1]: bound[2] for bound in bounds if bound is not None}
    del found["torch"]
    return found


if __name__ == "__main__":
    for name, version in floors().items():
        print(f"{name}=={version}")
