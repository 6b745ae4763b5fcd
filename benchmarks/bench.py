"""Measure the figures of the pages, a step at a time; an interrupted run goes on where it stopped.

    make bench                          all steps that are not done, one after the other
    make bench PAGE=docs/native.md      the steps of one page
    python benchmarks/bench.py --list   the steps, how long each takes, and which are done

A step that ends well leaves a stamp, build/bench/NAME.done, with the time that it took. It is done
while the stamp is newer than its benchmark, the sources of the native kernel and the files that it
reads. Delete the stamp to measure again. The machine should have nothing else to do.
"""

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
STAMPS = Path("build/bench")
NATIVE = ("CMakeLists.txt", "src/headwise/kernels/native/source/**/*.*")
WATCHING, NATIVE_PAGE, SCALE = "docs/watching-speed.md", "docs/native.md", "docs/scale.md"
MODELS = "docs/attention-implementation.md"


@dataclass(frozen=True)
class Step:
    """One command, and what it writes.

    Attributes:
        minutes: About how long it takes on an idle machine: the lines of its tables times the
            seconds for each.
        command: A benchmark and its options; {page} and {figure} stand for what it writes.
        page: The page of its figures; empty if a later step reads its rows.
        blocks: The measured parts of the page that it writes; "" is the one without a name.
        figure: An SVG that it draws.
        reads: Files of rows, which earlier steps write.
        threads: The threads of every library; None: as the benchmark has it.
    """

    name: str
    minutes: float
    command: str
    page: str = ""
    blocks: tuple[str, ...] = ("",)
    figure: str = ""
    reads: tuple[str, ...] = ()
    threads: int | None = None

    @property
    def script(self) -> str:
        return f"benchmarks/{shlex.split(self.command)[0]}"

    @property
    def stamp(self) -> Path:
        return STAMPS / f"{self.name}.done"

    def arguments(self) -> list[str]:
        script, *options = shlex.split(self.command.format(page=self.page, figure=self.figure))
        return [sys.executable, f"benchmarks/{script}", *options]


_WHOLE = "whole_models.py --tokens"
_LONG = '8192 --only "on 4" --parts prefill token --rounds 5'
_ONE, _ONE_LONG = "build/bench/one.json", "build/bench/long.json"
_TWO, _TWO_LONG = "build/bench/two.json", "build/bench/two-long.json"

# fmt: off
STEPS = (
    Step("observe", 10, "observe.py --threads 1 --into {page}", WATCHING),
    Step("short-watch", 2, "short_watch.py --into {page}", WATCHING, ("short calls",), threads=1),
    Step("spans", 6, "spans.py --into {page}", WATCHING, ("spans",), threads=1),
    Step("layer", 12, "layer.py --threads 1 --json build/bench/layer.json --into {page}",
         "docs/speed.md"),
    Step("role-reading", 8, "role_reading.py --into {page}", "docs/roles-speed.md",
         ("", "importance")),
    Step("report-time", 15, "report_time.py --into {page}", "docs/roles-speed.md", ("report",)),
    Step("short-calls", 5, "short_calls.py --into {page}", "docs/short-calls.md"),
    Step("native", 20, "native.py --into {page}", NATIVE_PAGE),
    Step("native-cores", 16, "native.py --cores --into {page}", "docs/native-cores.md"),
    Step("native-builds", 3, "native_builds.py --into {page}", NATIVE_PAGE, ("builds",)),
    Step("statistics-pass", 2, "statistics_pass.py --into {page}", NATIVE_PAGE, ("statistics",)),
    Step("native-peak", 1, "native_peak.py --into {figure}", NATIVE_PAGE, (),
         figure="docs/native-peak.svg"),
    Step("kernel-choice", 8, "kernel_choice.py --into {page}", "docs/kernel-choice.md"),
    Step("pruning-time", 5, "pruning_time.py --threads 1 --clock cpu --passes 9 --into {page}",
         "docs/smaller.md", ("random models",)),
    Step("clip", 9, "clip.py --clock cpu --seconds 180 --into {page}", "docs/entropy-collapse.md"),
    Step("corpus-memory", 20, "corpus_memory.py --into {page} --figure {figure}", SCALE,
         ("memory",), figure="docs/corpus-memory.svg"),
    Step("corpus-sharding", 20, "corpus_sharding.py --into {page}", SCALE, ("sharding",),
         threads=1),
    Step("long-text", 5, "long_text.py --into {page}", SCALE, ("length",), threads=1),
    Step("scale", 5, "scale.py --into {page}", SCALE, ("scale",), threads=1),
    Step("alignment", 40, "alignment.py --into {page}", "docs/head-files.md", ("alignment",),
         threads=1),
    Step("models", 60, f"{_WHOLE} 512 2048 --threads 1 --clock cpu --json {_ONE}"),
    Step("models-long", 30, f"{_WHOLE} {_LONG} --threads 1 --json {_ONE_LONG}"),
    Step("models-page", 0.1, f"whole_models.py --read {_ONE} {_ONE_LONG} --into {{page}}", MODELS,
         reads=(_ONE, _ONE_LONG)),
    Step("models-cores", 60, f"{_WHOLE} 512 2048 --threads 2 --seconds 5 --json {_TWO}"),
    Step("models-cores-long", 30, f"{_WHOLE} {_LONG} --threads 2 --json {_TWO_LONG}"),
    Step("models-cores-page", 0.1,
         f'whole_models.py --read {_TWO} {_TWO_LONG} --page-part "all cores" --into {{page}}',
         MODELS, ("all cores",), reads=(_TWO, _TWO_LONG)),
)
# fmt: on


def main(arguments: Sequence[str] | None = None) -> int:
    os.chdir(ROOT)
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "page", nargs="?", default="", help="measure the figures of this page alone"
    )
    parser.add_argument("--list", action="store_true", help="print the steps, and run none")
    options = parser.parse_args(arguments)
    steps = chosen(STEPS, options.page)
    if not steps:
        pages = sorted({step.page for step in STEPS if step.page})
        parser.error(f"no step writes {options.page}. Name one of {', '.join(pages)}.")
    left = sum(step.minutes for step in steps if not is_done(step))
    print(f"{len(steps)} steps; about {left:.0f} minutes are left.", flush=True)
    for step in steps:
        if is_done(step):
            print(f"{step.name}: done, {step.stamp.read_text('utf-8').strip()}", flush=True)
        elif options.list:
            print(f"{step.name}: about {step.minutes:g} minutes, {step.page or 'rows'}", flush=True)
        elif code := run(step):
            return code
    return 0


def chosen(steps: Iterable[Step], page: str) -> list[Step]:
    """The steps of a page, with those whose rows they read; all steps if no page is named."""
    steps = list(steps)
    if not page:
        return steps
    own = [step for step in steps if step.page == page]
    reads = [path for step in own for path in step.reads]
    return [step for step in steps if step in own or any(path in step.command for path in reads)]


def is_done(step: Step) -> bool:
    """Whether a step has a stamp that is newer than all it depends on."""
    if not step.stamp.is_file():
        return False
    needed = [Path(step.script), *(path for pattern in NATIVE for path in Path().glob(pattern))]
    needed += map(Path, step.reads)
    stamped = step.stamp.stat().st_mtime
    return all(path.exists() and path.stat().st_mtime <= stamped for path in needed)


def run(step: Step) -> int:
    """Run a step; if it ends well, leave its stamp. Returns its exit status."""
    print(f"{step.name}: about {step.minutes:g} minutes ...", flush=True)
    STAMPS.mkdir(parents=True, exist_ok=True)
    step.stamp.unlink(missing_ok=True)
    started = time.monotonic()
    threads = {} if step.threads is None else {"OMP_NUM_THREADS": str(step.threads)}
    code = subprocess.run(step.arguments(), env=os.environ | threads).returncode
    minutes = (time.monotonic() - started) / 60
    if code:
        print(f"{step.name}: failed with status {code} after {minutes:.1f} minutes", flush=True)
        return code
    today = time.strftime("%Y-%m-%d")
    step.stamp.write_text(f"{minutes:.1f} minutes, {today}\n", "utf-8")
    print(f"{step.name}: took {minutes:.1f} minutes", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
