"""Measure the figures of the pages, a step at a time; an interrupted run goes on where it stopped.

    make bench                                      all steps that are not done
    make bench PAGE=benchmarks/results/native.md    the steps of one page
    python -m benchmarks.bench --list               the steps, their time, and which are done

A step that ends well leaves a stamp, build/bench/NAME.done, with the time that it took. It is done
while the stamp is newer than its benchmark, the sources of the native kernel and the files that it
reads. Delete the stamp to measure again. After a step that fails, those that do not read its rows
still run. The machine should have nothing else to do.
"""

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
STAMPS = Path("build/bench")
NATIVE = ("CMakeLists.txt", "src/headwise/kernels/native/source/**/*.*")
RESULTS = "benchmarks/results"
OBSERVING, NATIVE_PAGE = f"{RESULTS}/observing.md", f"{RESULTS}/native.md"
MODELS = f"{RESULTS}/attention-implementation.md"


@dataclass(frozen=True)
class Step:
    """One command, and what it writes.

    Attributes:
        minutes: About how long it takes on an idle machine: the lines of its tables times the
            seconds for each.
        command: A module of this folder and its options; {page} and {figure} for what it writes.
        page: The page of its figures; empty if a later step reads its rows.
        blocks: The measured parts of the page that it writes; "" is the one without a name.
        figure: An SVG that it draws.
        reads: Files of rows, which earlier steps write.
        threads: The threads of every library; None: as the benchmark has it.
        libraries: A folder of libraries for this step alone, which may be missing.
    """

    name: str
    minutes: float
    command: str
    page: str = ""
    blocks: tuple[str, ...] = ("",)
    figure: str = ""
    reads: tuple[str, ...] = ()
    threads: int | None = None
    libraries: str = ""

    @property
    def script(self) -> str:
        return f"benchmarks/{shlex.split(self.command)[0].replace('.', '/')}.py"

    @property
    def stamp(self) -> Path:
        return STAMPS / f"{self.name}.done"

    def arguments(self) -> list[str]:
        module, *options = shlex.split(self.command.format(page=self.page, figure=self.figure))
        return [sys.executable, "-m", f"benchmarks.{module}", *options]


_WHOLE = "speed.whole_models --clock cpu --threads 1 --seconds 3"
_CORES = "speed.whole_models --threads 2 --seconds 3"
_GROUPS = '--only "llama, 16 heads on 4" --tokens 512 2048'
_LONG = '--only "llama, 16 heads on 4, 2 layers" --tokens 8192 --parts prefill token'
_HEADS, _ENCODERS = '--only "llama, 16 heads"', '--only "8 padded" t5 vit'
_COMPILED = '--compiled zentorch --only "llama, 16 heads on 4" vit --tokens 512 2048'
_ONE = tuple(f"build/bench/one-{n}.json" for n in ("groups", "long", "heads", "encoders"))
_RIVAL = "build/bench/one-zentorch.json"
_TWO = tuple(f"build/bench/two-{name}.json" for name in ("groups", "long", "heads", "encoders"))

# What depends least on a quiet machine comes last.
# fmt: off
STEPS = (
    Step("models", 6, f"{_WHOLE} {_GROUPS} --json {_ONE[0]}"),
    Step("models-long", 4.7, f"{_WHOLE} {_LONG} --least-rounds 3 --json {_ONE[1]}"),
    Step("models-heads", 2.7, f"{_WHOLE} {_HEADS} --tokens 512 2048 --parts prefill token "
         f"--json {_ONE[2]}"),
    Step("models-encoders", 6.2, f"{_WHOLE} {_ENCODERS} --json {_ONE[3]}"),
    Step("models-zentorch", 3, f"{_WHOLE} {_COMPILED} --json {_RIVAL}", libraries="build/rivals"),
    Step("models-page", 0.2, f"speed.whole_models --read {' '.join(_ONE)} {_RIVAL} --into {{page}}",
         MODELS, reads=(*_ONE, _RIVAL)),
    Step("short-watch", 2.8, "speed.short_watch --clock cpu --seconds 6 --into {page}", OBSERVING,
         ("short calls",), threads=1),
    Step("host-time", 3, "speed.host_time --seconds 20 --into {page}", OBSERVING, ("host time",),
         threads=1),
    Step("attentions", 3, "speed.attentions --into {page}", OBSERVING, ("attentions",), threads=1),
    Step("images", 3, "speed.images --into {page}", f"{RESULTS}/images.md", ("images",), threads=1),
    Step("short-calls", 1.5, "speed.short_calls --seconds 3 --into {page}",
         f"{RESULTS}/short-calls.md"),
    Step("models-cores", 3.5, f"{_CORES} {_GROUPS} --json {_TWO[0]}"),
    Step("models-cores-long", 1.7, f"{_CORES} {_LONG} --dtypes bfloat16 --json {_TWO[1]}"),
    Step("models-cores-heads", 1.5, f"{_CORES} {_HEADS} --tokens 2048 --parts prefill token --json "
         f"{_TWO[2]}"),
    Step("models-cores-encoders", 2, f"{_CORES} {_ENCODERS} --parts encoders --json {_TWO[3]}"),
    Step("models-cores-page", 0.2,
         f'speed.whole_models --read {" ".join(_TWO)} --page-part "all cores" --into {{page}}',
         MODELS, ("all cores",), reads=_TWO),
    Step("native-cores", 3.2, "speed.native --cores --seconds 0.4 --into {page}",
         f"{RESULTS}/native-cores.md"),
    Step("native", 4.6, "speed.native --seconds 0.4 --into {page}", NATIVE_PAGE),
    Step("zentorch", 1.3, "speed.zentorch_rival --seconds 1 --into {page}", f"{RESULTS}/rivals.md",
         ("zentorch",), libraries="build/rivals"),
    Step("kernel-choice", 1.3, "speed.kernel_choice --seconds 0.3 --into {page}",
         f"{RESULTS}/kernel-choice.md"),
    Step("layer", 3, "speed.layer --threads 1 --clock cpu --seconds 2 --into {page}",
         f"{RESULTS}/layer.md", libraries="build/peers"),
    Step("observe", 4.3, "speed.observe --threads 1 --clock cpu --seconds 1 --into {page}",
         OBSERVING),
    Step("spans", 1, "speed.spans --seconds 5 --passes 2 --into {page}", OBSERVING, ("spans",),
         threads=1),
    Step("statistics-pass", 0.6, "speed.statistics_pass --seconds 4 --into {page}", NATIVE_PAGE,
         ("statistics", "lacking")),
    Step("role-reading", 4.5, "speed.role_reading --sentences 150 --into {page}",
         f"{RESULTS}/roles-speed.md", ("", "importance")),
    Step("first-screen", 1, "real_models.first_screen --into {page}",
         f"{RESULTS}/real-models-smollm2.md", ("first screen",), threads=1),
    Step("smollm2-whole-way", 4, "real_models.study smollm2-whole-way --into {page}",
         f"{RESULTS}/real-models-smollm2.md", ("smollm2-whole-way",), threads=1),
    Step("batches", 3, "speed.batches --part throughput --into {page}", f"{RESULTS}/batches.md",
         ("throughput",), threads=1),
    Step("batches-memory", 2, "speed.batches --part memory --into {page}",
         f"{RESULTS}/batches.md", ("memory",), threads=1),
    Step("pruning-time", 1, "speed.pruning_time --threads 1 --clock cpu --passes 7 --into {page}",
         f"{RESULTS}/smaller.md", ("random models",)),
    Step("hybrid", 6, "evidence.hybrid --into {page}", f"{RESULTS}/hybrid.md", threads=1),
)
# fmt: on


def main(arguments: Sequence[str] | None = None) -> int:
    os.chdir(ROOT)
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("page", nargs="?", help="measure the figures of this page alone")
    parser.add_argument("--list", action="store_true", help="print the steps, and run none")
    options = parser.parse_args(arguments)
    own = [step for step in STEPS if options.page in (None, step.page)]
    if not own:
        pages = sorted({step.page for step in STEPS if step.page})
        parser.error(f"no step writes {options.page}. Name one of {', '.join(pages)}.")
    failed: list[Step] = []
    for step in STEPS:
        if step not in own and not any(writes_for(step, other) for other in own):
            continue
        if is_done(step):
            print(f"{step.name}: done, {step.stamp.read_text('utf-8').strip()}", flush=True)
        elif options.list:
            print(f"{step.name}: about {step.minutes:g} minutes, {step.page or 'rows'}", flush=True)
        # Rows of an earlier run do not stand in for those of a failed step.
        elif any(writes_for(other, step) for other in failed) or run(step):
            failed.append(step)
    if failed:
        print(f"Failed: {', '.join(step.name for step in failed)}.", flush=True)
    return int(bool(failed))


def writes_for(step: Step, reader: Step) -> bool:
    """Whether a step writes rows that another one reads."""
    return any(path in step.command for path in reader.reads if step is not reader)


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
    changed = {} if step.threads is None else {"OMP_NUM_THREADS": str(step.threads)}
    if step.libraries:
        changed["PYTHONPATH"] = step.libraries
    code = subprocess.run(step.arguments(), env=os.environ | changed).returncode
    minutes = (time.monotonic() - started) / 60
    outcome = f"failed with status {code} after" if code else "took"
    print(f"{step.name}: {outcome} {minutes:.1f} minutes", flush=True)
    if not code:
        step.stamp.write_text(f"{minutes:.1f} minutes, {time.strftime('%Y-%m-%d')}\n", "utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main())
