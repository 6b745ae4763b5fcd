"""Memory of the corpus reader and of a whole job, sampled while they run.

    python -m benchmarks.speed.corpus_memory --into benchmarks/results/corpus-jobs.md \\
        --figure benchmarks/results/corpus-memory.svg

The reader goes over a generated file of 1 GB; the job watches every head of a small Llama on 8 MB,
cut to 16 tokens a text so that it ends in minutes. Both write the resident memory of their process
as they go. Files are deleted afterwards.
"""

import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
import torch

import headwise as hw
from benchmarks._report import parser_of, show, table
from benchmarks.speed._corpus import write_corpus, write_model
from headwise.corpora.streams import open_source

Samples = list[tuple[float, float]]
WIDTH, HEIGHT, LEFT, FLOOR = 520, 220, 56, 180
COLORS = ("#0b6e99", "#d9730d")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--reader-bytes", type=int, default=10**9)
    parser.add_argument("--job-bytes", type=int, default=8 * 10**6)
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        samples = {
            "reader": read_corpus(Path(name), options.reader_bytes),
            "job": run_job(Path(name), options.job_bytes),
        }
    rows = [row_of(name, points) for name, points in samples.items()]
    sizes = (options.reader_bytes, options.job_bytes)
    cells = [
        [name, f"{size:,}", f"{early:.0f} MiB", f"{late:.0f} MiB", f"{1024 * slope:+.2f} KiB"]
        for (name, early, late, slope), size in zip(rows, sizes, strict=True)
    ]
    titles = ("", "bytes", "memory at a tenth", "at the end", "growth per MB")
    text = table(titles, cells)
    show(text, options.into, "memory")
    if options.figure:
        options.figure.write_text(draw(samples), "utf-8")


def read_corpus(folder: Path, n_bytes: int) -> Samples:
    path = write_corpus(folder / "large.jsonl", n_bytes)
    source = open_source(path)
    shards = max(1, n_bytes // 2**24)
    samples: Samples = []
    texts = characters = 0
    started = time.perf_counter()
    for shard in range(shards):
        for text in source.texts(shard, shards):
            texts += 1
            characters += len(text.text)
        samples.append((n_bytes * (shard + 1) / shards / 1e6, resident()))
    seconds = time.perf_counter() - started
    print(f"reader: {texts:,} texts, {characters / 1e6 / seconds:.0f} MB per second")
    path.unlink()
    return samples


def run_job(folder: Path, n_bytes: int) -> Samples:
    model = write_model(folder / "model")
    path = write_corpus(folder / "small.jsonl", n_bytes)
    job = hw.corpus(model, path, out=folder / "run", shards=25, max_tokens=16)
    samples: Samples = []

    def sample(done: int, total: int) -> None:
        samples.append((n_bytes * done / total / 1e6, resident()))

    job.run(on_progress=sample)
    job.merge()
    sample(job.shards, job.shards)
    return samples


def resident() -> float:
    """The resident memory of this process in MiB."""
    return psutil.Process().memory_info().rss / 2**20


def row_of(name: str, points: Samples) -> tuple[str, float, float, float]:
    """The memory after a tenth of the bytes and at the end, and the slope between them."""
    later = np.array(points[len(points) // 10 :])
    slope = np.polyfit(later[:, 0], later[:, 1], 1)[0] if len(later) > 1 else np.nan
    return name, later[0, 1], later[-1, 1], float(slope)


def draw(samples: dict[str, Samples]) -> str:
    """Memory over the share of the bytes, as an SVG."""
    top = max(memory for points in samples.values() for _, memory in points) * 1.1
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH + 90} {HEIGHT}" '
        f'font-family="sans-serif" font-size="12">',
        f'<path d="M{LEFT},10V{FLOOR}H{WIDTH}" fill="none" stroke="#888"/>',
        f'<text x="{LEFT - 6}" y="20" text-anchor="end">{top:.0f}</text>',
        f'<text x="{LEFT - 6}" y="{FLOOR}" text-anchor="end">0</text>',
        '<text x="4" y="40">MiB</text>',
        f'<text x="{WIDTH}" y="{FLOOR + 18}" text-anchor="end">all bytes read</text>',
    ]
    for color, (name, points) in zip(COLORS, samples.items(), strict=True):
        last = points[-1][0]
        line = " ".join(
            f"{LEFT + (WIDTH - LEFT) * x / last:.1f},{FLOOR - (FLOOR - 10) * y / top:.1f}"
            for x, y in points
        )
        height = FLOOR - (FLOOR - 10) * points[-1][1] / top
        label = f"{name}, {last:,.0f} MB"
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts.append(f'<text x="{WIDTH + 4}" y="{height:.0f}" fill="{color}">{label}</text>')
    return "\n".join([*parts, "</svg>\n"])


if __name__ == "__main__":
    main()
