"""Watch the heads of a model while it trains, at every n-th step."""

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float, Float64
from torch import Tensor, nn

from headwise._interrupts import deferring, uninterrupted
from headwise.errors import ArgumentError, UnsupportedError
from headwise.models import Site
from headwise.monitor._alarms import Alarm, AlarmRule, Alarms
from headwise.monitor._check import check_receivers, check_rules
from headwise.monitor._log import Log, write
from headwise.monitor._step_statistics import StepStatistics, read
from headwise.monitor._step_watch import StepWatch, unwrapped
from headwise.watch import Recorder, Request, check_arguments


class HeadMonitor:
    """Statistics of every head during training, as numbers for a logger.

    Call `step()` after each optimizer step. Watched are the first step and every n-th: 1, 100,
    200, … with `every=100`. A step is all its forward passes, so the micro-batches of gradient
    accumulation are taken together. Only training passes count: those in training mode and
    with gradients. Recomputing layers for the backward pass counts nothing twice. Outputs,
    gradients and random numbers are those of unwatched training to the last bit; between
    watched steps nothing of the monitor is on the model.

    The keys are `attn/L5.H3/entropy` for a head, `attn/L5/entropy/min` (`mean`, `max`) for a
    layer and `attn/entropy/min` (`mean`, `max`) for the model, each over the heads' values.
    `max_logit` of a head is its largest over all queries, every other statistic the mean over
    queries; NaN where no query has it. With rules, `attn/alarms` counts the heads with an alarm,
    once for each rule.

    With `torch.distributed` every rank calls `step()`, and a watched step ends with one
    all_reduce, so numbers and alarms are those of the whole batch on all ranks; `log` and
    `on_alarm` are called on rank 0 alone. A compiled model runs uncompiled on watched steps.

    A monitor is a callback of `transformers.Trainer`, as in `callbacks=[HeadMonitor(model)]`. The
    trainer then counts the steps, and its `state.log_history` gets the numbers of the model.

    Args:
        model: The module that training calls. Compile it, wrap it and freeze it first.
        every: How many optimizer steps from one watched step to the next.
        statistics: Names out of `headwise.tables.STATISTICS`.
        layers: The layers to watch, counted from 0. None is all of them.
        rules: `Above` and `Below`: what no head should do for long.
        log: Gets the numbers of each watched step: a `SummaryWriter`, or any function of
            the numbers and the step.
        on_alarm: Called with each `Alarm` when it goes off; `print` will do.
        group: The ranks that train on different texts. None is all of them.
    Raises:
        ArgumentError: the model is none, `every` is below 1, layers, rules, `log` or `on_alarm`
            are none, there is no such statistic, or a rule is on one that is not watched.

    Example:
        >>> from headwise.layer import MultiHeadAttention
        >>> layer = MultiHeadAttention(8, 2)
        >>> with HeadMonitor(layer, every=100) as monitor:
        ...     out = layer(torch.randn(1, 5, 8), causal=True)
        ...     scalars = monitor.step()
        >>> list(scalars)[:2]
        ['attn/L0.H0/entropy', 'attn/L0.H0/max_logit']
    """

    def __init__(
        self,
        model: nn.Module,
        every: int = 100,
        *,
        statistics: Sequence[str] = ("entropy", "max_logit", "first"),
        layers: Collection[int] | None = None,
        rules: Sequence[AlarmRule] = (),
        log: Log | None = None,
        on_alarm: Callable[[Alarm], object] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        model = check_arguments("HeadMonitor", model, layers, every)
        check_rules(rules, statistics)
        check_receivers(log, on_alarm)
        self._model, self._every, self._layers = unwrapped(model), every, layers
        self._log, self._on_alarm, self._group = log, on_alarm, group
        self._recorder = Recorder(self._model, Request(tuple(statistics)), layers, every=1)
        self._statistics = tuple(statistics)
        self._rules, self._alarms = tuple(rules), Alarms(rules)
        self._highest: dict[str, Float64[np.ndarray, " H"]] = {}
        self._steps, self._watched, self._closed = 0, 0, False
        self._step_watch = StepWatch(self._model, self._recorder)
        self._block = ExitStack()  # of a `with` statement, while it runs
        try:
            self._step_watch.open()
        except BaseException:  # an interrupt that waited until it was open
            self._step_watch.close()
            raise

    @property
    def steps(self) -> int:
        """How many optimizer steps were taken."""
        return self._steps

    @property
    def alarms(self) -> list[Alarm]:
        """What stood at the latest watched step, one alarm for each rule that is broken."""
        return self._alarms.standing(self._watched)

    def sites(self) -> list[Site]:
        """Where heads attend, and where they do but were not heard, and why.

        Each says its module and its layer: with `max_logit()`, whose weights to clip.
        """
        return self._recorder.sites()

    def step(self) -> dict[str, float]:
        """Count an optimizer step that was just taken; every rank calls it.

        Returns:
            The numbers of the step if it was watched, else an empty dict.
        Raises:
            ArgumentError: the monitor is closed, or a layer was asked for that is not there.
            UnsupportedError: the step was watched and no attention was seen.
        """
        self._check_open("step")
        self._steps += 1
        watched, next_too = self._step_watch.is_open, (self._steps + 1) % self._every == 0
        if not next_too:
            self._step_watch.close()
        scalars = self._report() if watched else {}
        if next_too:
            self._step_watch.open()
        return scalars

    def resume(self, steps: int) -> None:
        """Count on from here, where training is taken up again; the next step is watched.

        Passes since the latest step are forgotten.

        Args:
            steps: The optimizer steps taken before.
        Raises:
            ArgumentError: the monitor is closed, or `steps` is no whole number from 0 on.
        """
        self._check_open("resume")
        if isinstance(steps, bool) or not isinstance(steps, int | np.integer) or steps < 0:
            raise ArgumentError(
                f"HeadMonitor.resume: steps={steps!r}. Give a whole number, 0 or more."
            )
        self._steps = steps
        self._recorder.take_totals()
        self._step_watch.open()

    def max_logit(self) -> dict[str, Float[Tensor, " H"]]:
        """The largest logit of each head over the watched steps since the last reset.

        This is what QK-clip needs: `scale · q·k` over visible keys, over all ranks. No
        communication: `step()` has done it.

        Returns:
            A tensor of one number for each query head, by layer (`L5`), on the model's device.
        Raises:
            ArgumentError: `max_logit` is not watched, or no step was since the last reset.
        """
        if "max_logit" not in self._statistics:
            raise ArgumentError(
                "HeadMonitor.max_logit: it is not watched. Make the monitor with statistics="
                f"{(*self._statistics, 'max_logit')}."
            )
        if not self._highest:
            raise ArgumentError(
                "HeadMonitor.max_logit: nothing was seen since the last reset. Ask after the "
                "step() of a watched step."
            )
        device = self._device()
        return {
            layer: torch.tensor(values, dtype=torch.float32, device=device)
            for layer, values in self._highest.items()
        }

    def reset_max_logit(self) -> None:
        """Forget the largest logits, as after a clip."""
        self._highest = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """What `transformers.Trainer` calls first: count on where a resumed training stopped.

        Raises:
            ArgumentError: the trainer trains another model.
        """
        trained = kwargs["model"]
        if not any(module is self._model for module in trained.modules()):
            raise ArgumentError(
                f"HeadMonitor: the trainer trains another {type(trained).__name__}, which is not "
                f"the {type(self._model).__name__} of this monitor. Give both the same model."
            )
        self.resume(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """What `transformers.Trainer` calls after an optimizer step.

        The numbers of the whole model go into the trainer's log history.
        """
        places = (*self._statistics, "alarms")
        scalars = {k: x for k, x in self.step().items() if k.split("/")[1] in places}
        if scalars:
            about = {"step": state.global_step, "epoch": state.epoch}
            state.log_history.append(scalars | about)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """What `transformers.Trainer` calls last: take everything off the model.

        The monitor stays open for another training.
        """
        self._step_watch.close()

    if not TYPE_CHECKING:  # type checkers should still find a misspelled name

        def __getattr__(self, name: str) -> Callable[..., None]:
            # A trainer calls a method for each of its events, whose number grows by version.
            if name.startswith("on_"):
                return _do_nothing
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @uninterrupted
    def close(self) -> None:
        """Take everything off the model. What was reported stays readable."""
        self._step_watch.close()
        self._closed = True
        self._block.close()

    def __repr__(self) -> str:
        alarmed = sum(len(alarm.heads) for alarm in self.alarms)
        return (
            f"<HeadMonitor of {type(self._model).__name__}: every={self._every}, "
            f"steps={self._steps}, alarmed heads={alarmed}>"
        )

    def __enter__(self) -> "HeadMonitor":
        self._block.enter_context(deferring())
        return self

    @uninterrupted
    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # Nobody can step it any more; an interrupt may have kept it from whoever made it.
        if "_block" in self.__dict__:
            self.close()

    def _report(self) -> dict[str, float]:
        reading = self._read()
        self._watched = self._steps
        if "max_logit" in reading.values:
            for layer, rows in reading.layers().items():
                now = reading.values["max_logit"][rows]
                self._highest[layer] = np.fmax(self._highest.get(layer, now), now)
        new = self._alarms.take_in(self._steps, reading)
        scalars = reading.scalars()
        if self._rules:
            scalars["attn/alarms"] = float(sum(len(alarm.heads) for alarm in self.alarms))
        self._tell(scalars, new)
        return scalars

    def _read(self) -> StepStatistics:
        taken = self._recorder.take_totals()
        if not taken:
            raise UnsupportedError(
                f"HeadMonitor: no attention was seen in step {self._steps} of "
                f"{type(self._model).__name__}. Give the module that training calls, in training "
                f"mode and with gradients, and call step() after its forward pass."
            )
        missing = set(self._layers or ()) - {site.layer for site in taken}
        if missing:
            raise ArgumentError(
                f"HeadMonitor: layers {sorted(missing)} were not seen in step {self._steps}. "
                f"Name layers of the model, counted from 0."
            )
        return read(taken, self._device(), self._group)

    def _tell(self, scalars: dict[str, float], new: list[Alarm]) -> None:
        together = dist.is_available() and dist.is_initialized()
        if together and dist.get_rank(self._group) != 0:
            return
        if self._log is not None:
            write(self._log, scalars, self._steps)
        if self._on_alarm is not None:
            for alarm in new:
                self._on_alarm(alarm)

    def _device(self) -> torch.device:
        return next((weight.device for weight in self._model.parameters()), torch.device("cpu"))

    def _check_open(self, what: str) -> None:
        if self._closed:
            raise ArgumentError(f"HeadMonitor.{what}: the monitor is closed. Make another.")


def _do_nothing(*_: Any, **__: Any) -> None:
    """The answer to an event of a trainer that the monitor has no use for."""
