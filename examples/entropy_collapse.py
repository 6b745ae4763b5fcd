"""Train small models into entropy collapse, and compare which alarm goes off first.

Each seed trains two Mini-GPTs that differ only in the learning rate. It warms up to 0.002, which is
right for this model, or climbs to thirty times that. Two rules apply to attention and two to the
loss; none of them goes off at the right rate.

    python examples/entropy_collapse.py --seeds 0 1 2 3 4

With `--clip` those at the rate that is too high are trained in two ways: without QK-clip, and with
a clip after every step. Does it bound the logits, and is the loss any lower?

    python examples/entropy_collapse.py --clip 100
"""

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from headwise.corpora import EOS, PAD, Grammar
from headwise.lab import MiniGPT, TrainSettings, make_tokenizer
from headwise.monitor import Above, Alarm, Below, ClipReport, HeadMonitor, QKClip

RIGHT_RATE, TOO_HIGH = 0.002, 0.06
# QK-clip steps in at 100; a head with an entropy of .1 nats attends to hardly more than one token.
RULES = (Above("max_logit", 100.0, patience=2), Below("entropy", 0.1, patience=2))


@dataclass
class Rise:
    """Records when a loss is `by` above its lowest value, `patience` times in a row."""

    by: float
    patience: int
    lowest: float = math.inf
    lowest_at: int = 0
    above: int = 0
    alarm: int | None = None

    def follow(self, step: int, loss: float) -> None:
        if loss < self.lowest:
            self.lowest, self.lowest_at = loss, step
        # Not `>`: a NaN loss counts as risen.
        self.above = 0 if loss <= self.lowest + self.by else self.above + 1
        if self.alarm is None and self.above >= self.patience:
            self.alarm = step


@dataclass
class Run:
    """The steps at which each rule went off."""

    seed: int
    rate: float
    first: dict[str, Alarm] = field(default_factory=dict)
    # Batches are small: smoothed over about 50 of them, the loss of a good run still rises by .15.
    training: Rise = field(default_factory=lambda: Rise(by=0.2, patience=1))
    validation: Rise = field(default_factory=lambda: Rise(by=0.1, patience=2))
    smooth: float = math.nan
    last: float = math.nan  # on the held-out lines
    highest: float = -math.inf  # logit of any head at any watched step
    above: int = 0  # steps with a logit of more than 1.2 times the bar
    clipped_steps: int = 0

    def record(self, alarm: Alarm) -> None:
        self.first.setdefault(str(alarm.rule), alarm)

    def follow(self, step: int, loss: float) -> None:
        self.smooth = loss if step == 1 else 0.98 * self.smooth + 0.02 * loss
        self.training.follow(step, self.smooth)

    def follow_logits(self, scalars: Mapping[str, float], bar: float | None) -> None:
        if scalars:
            largest = scalars["attn/max_logit/max"]
            self.highest = max(self.highest, largest)
            self.above += bar is not None and largest > 1.2 * bar

    def follow_clips(self, report: ClipReport) -> None:
        self.clipped_steps += bool(report.heads)

    def evaluate(self, step: int, loss: float) -> None:
        self.last = loss
        self.validation.follow(step, loss)


def train(
    settings: TrainSettings,
    every: int,
    watch_every: int | None = None,
    bar: float | None = None,
) -> Run:
    """Train one model with a monitor, and with QK-clip if there is a bar.

    Args:
        every: The steps from one evaluation to the next.
        watch_every: The steps from one watched step to the next. None is `every`.
    """
    torch.manual_seed(settings.seed)
    grammar = settings.grammar()
    model = MiniGPT(settings.config(len(grammar.vocabulary)))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99), fused=True)
    padding = grammar.vocabulary.index(PAD)
    held_out = next(batches(replace(settings, seed=settings.seed + 1000, batch_size=128), grammar))
    run = Run(settings.seed, settings.learning_rate)

    def loss_of(ids: Tensor) -> Tensor:
        logits, targets = model(ids[:, :-1]), ids[:, 1:]
        return functional.cross_entropy(logits.mT, targets, ignore_index=padding)

    with HeadMonitor(model, watch_every or every, rules=RULES, on_alarm=run.record) as monitor:
        clip = None if bar is None else QKClip(monitor, bar)
        for ids in batches(settings, grammar):
            optimizer.param_groups[0]["lr"] = settings.learning_rate_at(monitor.steps)
            loss = loss_of(ids)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            run.follow_logits(monitor.step(), bar)
            if clip is not None:
                run.follow_clips(clip.step())
            run.follow(monitor.steps, loss.item())
            if monitor.steps % every == 0:
                with torch.no_grad():
                    run.evaluate(monitor.steps, loss_of(held_out).item())
    return run


def batches(settings: TrainSettings, grammar: Grammar) -> Iterator[Tensor]:
    """One batch of lines per step: `<bos>`, words, `<eos>`, padding on the right."""
    tokenizer = make_tokenizer(grammar.vocabulary)
    tokenizer.enable_padding(pad_id=grammar.vocabulary.index(PAD), pad_token=PAD)
    rng = np.random.default_rng(settings.seed)
    for _ in range(settings.steps):
        lines = [f"{grammar.line(rng)} {EOS}" for _ in range(settings.batch_size)]
        yield torch.tensor([encoding.ids for encoding in tokenizer.encode_batch(lines)])


def row(run: Run) -> str:
    """One line of the table."""
    alarms = [run.first.get(str(rule)) for rule in RULES]
    steps = [None if alarm is None else alarm.step for alarm in alarms]
    steps += [run.training.alarm, run.validation.alarm]
    lowest = f"{run.validation.lowest:.2f} (step {run.validation.lowest_at})"
    shown = ["–" if step is None else str(step) for step in steps]
    return f"| {' | '.join([str(run.seed), f'{run.rate:g}', *shown, lowest, f'{run.last:.2f}'])} |"


def table(runs: Sequence[Run]) -> str:
    """The runs as a Markdown table: when each rule first went off, and the validation loss."""
    rules = " | ".join(map(str, RULES))
    last = "training loss | validation loss | lowest validation loss | last"
    return "\n".join([f"| seed | rate | {rules} | {last} |", "|--:" * 8 + "|", *map(row, runs)])


def clip_row(clip: str, run: Run) -> str:
    """One line of the table of clipped runs."""
    clips: Sequence[object] = [run.above, run.clipped_steps]
    if clip == "none":
        clips = ["–"] * len(clips)
    losses = [f"{run.validation.lowest:.2f}", f"{run.last:.2f}"]
    cells = [run.seed, clip, f"{run.highest:.0f}", *clips, *losses]
    return f"| {' | '.join(map(str, cells))} |"


def clip_table(rows: Sequence[str]) -> str:
    """Runs without a clip and with one, as a Markdown table."""
    titles = ["seed", "clip", "largest logit", "steps above 1.2 x the bar", "steps with a clip"]
    titles += ["lowest validation loss", "last"]
    marks = ["--:", ":--", *["--:"] * 5]
    return "\n".join([f"| {' | '.join(titles)} |", f"| {' | '.join(marks)} |", *rows])


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--clip", type=float, help="the bar of QK-clip")
    return parser.parse_args(arguments)


def settings_of(seed: int, rate: float, steps: int) -> TrainSettings:
    """A warm-up to the right rate, or a climb through the whole run to one that is too high."""
    return TrainSettings(
        seed=seed, steps=steps, learning_rate=rate, warmup=50 if rate == RIGHT_RATE else steps,
        batch_size=16, d_model=64, n_layers=2, dropout=0.0,
    )  # fmt: skip


def compare_alarms(options: argparse.Namespace) -> None:
    runs = []
    for rate in (RIGHT_RATE, TOO_HIGH):
        for seed in options.seeds:
            runs.append(train(settings_of(seed, rate, options.steps), options.every))
            for alarm in runs[-1].first.values():
                print(f"seed {seed}, rate {rate:g}: {alarm}")
    print(table(runs))


def compare_clipped(options: argparse.Namespace) -> None:
    print(clip_table([]))
    for seed in options.seeds:
        settings = settings_of(seed, TOO_HIGH, options.steps)
        print(clip_row("none", train(settings, options.every)), flush=True)
        run = train(settings, options.every, watch_every=1, bar=options.clip)
        print(clip_row("after each step", run), flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    if options.clip is None:
        compare_alarms(options)
    else:
        compare_clipped(options)


if __name__ == "__main__":
    main()
