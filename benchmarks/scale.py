"""How a corpus job scales: a simulation with measured times, stragglers and lost workers.

    OMP_NUM_THREADS=1 python benchmarks/scale.py --into benchmarks/results/corpus-jobs.md

Measured here, on one core: a pass of one decoder layer of a 70B model's shape, plain and watched,
and its share of the core's fastest matrix product; the times to write a shard's table and to merge
it. The rest of the model is scaled by its number of layers. Nothing is measured on GPUs: a GPU is
assumed to reach the product's share of its specified speed times `utilisation`, which stands with
all other assumptions in `Cluster` and on the page. A worker opens the model, then takes the first
shard that is unfinished and unclaimed, computes it and writes it; that is the rule of
`CorpusJob.run`.
"""

import argparse
import heapq
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from _report import cpu_name, insert, software, table
from _timing import interleaved
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

import headwise as hw
from headwise.tables import Head, HeadTable, Totals
from headwise.watch import DEFAULT

HOUR = 3600.0
LAYERS, VOCABULARY = 80, 128256  # of Llama 3 70B
HEADS = LAYERS * 64
SHAPE = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}


@dataclass(frozen=True)
class Cluster:
    """A study and the machines it runs on; times in seconds.

    Attributes:
        tokens: The tokens of the corpus.
        parameters: The parameters of the model; a pass takes two operations for each and token.
        gpus_per_worker: How many GPUs one copy of the model needs.
        operations: What one GPU computes in a second in the model's dtype, at its best.
        utilisation: The share of it that a pass reaches.
        watching: The time of a watched pass to one that is not watched.
        opening: The time to open the model and to hash its weights or find them hashed.
        writing: The time to write the table of a shard.
        merging: The time to read one shard's table and to add it.
        spread: The standard deviation of the logarithm of a shard's time.
        stragglers: The share of workers that are `slowness` times as slow.
        failures: How often a worker is lost, per worker and hour; it comes back by opening again.
    """

    tokens: float = 1e9
    parameters: float = 70e9
    gpus_per_worker: int = 4
    operations: float = 9.9e14
    utilisation: float = 0.35
    watching: float = 1.3
    opening: float = 600.0
    writing: float = 1.0
    merging: float = 0.1
    spread: float = 0.1
    stragglers: float = 0.05
    slowness: float = 2.0
    failures: float = 0.05

    @property
    def seconds_per_token(self) -> float:
        """The time of one worker for one token."""
        speed = self.operations * self.utilisation * self.gpus_per_worker
        return 2 * self.parameters * self.watching / speed


def simulate(cluster: Cluster, gpus: int, shards: int, seed: int = 0) -> tuple[float, int]:
    """The seconds from the start to the merged table, and the number of lost shards.

    A lost worker has computed part of a shard in vain; another worker takes it up.
    """
    rng = np.random.default_rng(seed)
    workers = gpus // cluster.gpus_per_worker
    slow = np.where(rng.random(workers) < cluster.stragglers, cluster.slowness, 1.0)
    work = cluster.tokens / shards * cluster.seconds_per_token
    free = [(cluster.opening, worker) for worker in range(workers)]
    heapq.heapify(free)
    waiting = shards
    finished, lost = 0.0, 0
    while waiting:
        start, worker = heapq.heappop(free)
        noise = rng.lognormal(0.0, cluster.spread)
        took = work * slow[worker] * noise + cluster.writing
        until_loss = rng.exponential(HOUR / cluster.failures) if cluster.failures else np.inf
        if until_loss < took:
            lost += 1
            heapq.heappush(free, (start + until_loss + cluster.opening, worker))
            continue
        waiting -= 1
        finished = max(finished, start + took)
        heapq.heappush(free, (start + took, worker))
    return finished + shards * cluster.merging, lost


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--into", type=Path)
    parser.add_argument("--tokens", type=int, default=256, help="tokens of the measured text")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    layer = measure_layer(options.tokens, options.rounds)
    writing, merging, size = measure_reduction()
    cluster = Cluster(watching=layer.watching, writing=writing, merging=merging)
    measured = (
        f"Measured on {cpu_name()} ({software()}): the table of {HEADS:,} heads and "
        f"{len(DEFAULT)} statistics has "
        f"{size / 1e6:.1f} MB; it is written in {writing:.2f} s, and read and added in "
        f"{merging:.2f} s of one core."
    )
    parts = [layer.report(cluster), measured, assumed(cluster), *sections(cluster)]
    text = "\n\n".join(parts)
    print(text)
    if options.into:
        insert(text, options.into, "scale")


@dataclass(frozen=True)
class LayerTimes:
    """A pass of one layer over one text on one core; times in seconds.

    Attributes:
        plain: Of a pass that is not watched.
        watching: The ratio of a watched pass to a plain one, with its interval as text.
        product: The operations per second of the core's matrix product of 2048 rows.
    """

    tokens: int
    parameters: int
    plain: float
    watching: float
    interval: str
    product: float

    @property
    def operations(self) -> float:
        """Operations per second of a plain pass, two for each parameter and token."""
        return 2 * self.parameters * self.tokens / self.plain

    def report(self, cluster: Cluster) -> str:
        # The embedding is looked up, and only the last layer's product remains to be scaled.
        output = VOCABULARY * SHAPE["hidden_size"] / self.parameters
        per_token = self.plain / self.tokens * (LAYERS + output)
        years = cluster.tokens * per_token * self.watching / (365.25 * 24 * HOUR)
        return (
            f"One decoder layer of a 70B model's shape (8192 wide, 64 heads on 8, float32, "
            f"{self.parameters / 1e6:.0f} million parameters) on one core of {cpu_name()}, a text "
            f"of {self.tokens:,} tokens: {self.plain:.1f} s, {self.operations / 1e9:.0f} Gflop/s, "
            f"{self.operations / self.product:.0%} of the core's matrix product; watched "
            f"{self.interval} times as long. {LAYERS} such layers and the output layer take "
            f"{per_token:.2f} s a token: {1 / per_token:.2f} tokens a second and core, and "
            f"{years:,.0f} core-years for {cluster.tokens / 1e9:.0f} billion tokens, watched."
        )


def measure_layer(tokens: int, rounds: int) -> LayerTimes:
    """One layer with random weights, by the clock of the processor, plain and watched in turn."""
    config = LlamaConfig(**SHAPE, num_hidden_layers=1, attn_implementation="sdpa")
    torch.manual_seed(0)
    with torch.device("meta"):
        layer = LlamaDecoderLayer(config, 0)
    layer = layer.to_empty(device="cpu").eval()
    for weight in layer.parameters():
        torch.nn.init.normal_(weight, std=0.02)
    x = torch.randn(1, tokens, config.hidden_size)
    places = torch.arange(tokens)[None]
    rope = LlamaRotaryEmbedding(config)(x, places)

    def run() -> None:
        with torch.no_grad():
            layer(x, position_embeddings=rope, position_ids=places)

    def run_watched() -> None:
        with hw.observe(layer) as watch:
            run()
        assert len(watch.table().heads) == config.num_attention_heads

    left, right = torch.randn(2048, 8192), torch.randn(8192, 8192)
    cases = {"plain": run, "watched": run_watched, "product": lambda: left @ right}
    times = interleaved(cases, rounds, "cpu")
    ratio = times.ratio("watched", "plain")
    return LayerTimes(
        tokens,
        sum(weight.numel() for weight in layer.parameters()),
        times.median("plain") / 1000,
        ratio.median,
        str(ratio),
        2 * 2048 * 8192 * 8192 / (times.median("product") / 1000),
    )


def measure_reduction(rounds: int = 5) -> tuple[float, float, int]:
    """Seconds of one core to write a shard's table, and to read and add it; its bytes."""
    rng = np.random.default_rng(0)
    heads = tuple(Head("", layer, head) for layer in range(80) for head in range(64))

    def totals() -> Totals:
        rows = rng.random((8, HEADS))
        return Totals.of_texts(rows, np.ones_like(rows), rows.max(0))

    whole = HeadTable(heads, np.arange(HEADS) // 8, {name: totals() for name in DEFAULT})
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "table.parquet"
        started = time.process_time()
        for _ in range(rounds):
            whole.save(path)
        written = time.process_time()
        for _ in range(rounds):
            whole += HeadTable.load(path)
        merged = time.process_time()
        size = path.stat().st_size
    return (written - started) / rounds, (merged - written) / rounds, size


def assumed(cluster: Cluster) -> str:
    return (
        f"Assumed: {cluster.parameters / 1e9:.0f} billion parameters on {cluster.gpus_per_worker} "
        f"GPUs of {cluster.operations / 1e12:.0f} Tflop/s at {cluster.utilisation:.0%}, and that "
        f"watching takes {cluster.watching:.2f} of a plain pass there too; "
        f"{cluster.opening / 60:.0f} minutes to open the model; {cluster.stragglers:.0%} of "
        f"workers are {cluster.slowness:.0f} times as slow, and each is lost "
        f"{cluster.failures:.2f} times an hour. Measured: {cluster.writing:.2f} s to write a "
        f"shard, {cluster.merging:.2f} s to merge one."
    )


def sections(cluster: Cluster) -> list[str]:
    sizes = (8, 64, 256, 1024)
    rows = []
    for gpus in sizes:
        workers = gpus // cluster.gpus_per_worker
        ideal = cluster.tokens * cluster.seconds_per_token / workers
        hours, lost = medians(cluster, gpus, 1024)
        calm, _ = medians(replace(cluster, stragglers=0, failures=0), gpus, 1024)
        share = ideal / HOUR / hours
        rows.append((str(gpus), str(workers), f"{ideal / HOUR:.1f} h", f"{calm:.1f} h",
                     f"{hours:.1f} h", f"{share:.0%}", f"{lost:.0f}"))  # fmt: skip
    titles = ("GPUs", "workers", "ideal", "undisturbed", "with stragglers and losses",
              "efficiency", "shards lost")  # fmt: skip
    counts = (16, 64, 256, 1024, 4096, 16384)
    by_shards = [
        (f"{shards:,}", f"{cluster.tokens / shards / 1e6:.2f} million", *(
            f"{medians(cluster, gpus, shards)[0]:.1f} h" for gpus in (8, 64, 256)
        ))
        for shards in counts
    ]  # fmt: skip
    return [
        "1024 shards:\n\n" + table(titles, rows),
        "Other numbers of shards:\n\n"
        + table(("shards", "tokens each", "8 GPUs", "64 GPUs", "256 GPUs"), by_shards),
    ]


def medians(cluster: Cluster, gpus: int, shards: int, runs: int = 21) -> tuple[float, float]:
    """The median hours and lost shards of several simulated runs."""
    results = np.array([simulate(cluster, gpus, shards, seed) for seed in range(runs)])
    hours, lost = np.median(results, axis=0)
    return float(hours) / HOUR, float(lost)


if __name__ == "__main__":
    main()
