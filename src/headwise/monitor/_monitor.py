"""Monitor the heads of a model during training, at every n-th step."""

import weakref
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, Protocol, SupportsIndex, runtime_checkable

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from headwise._torch_private import call_forward_pre_hooks, forward_pre_hooks, wrapped_by_compiler
from headwise.capture import Site
from headwise.errors import ArgumentError, UnsupportedError
from headwise.models import Hooks, check_model, device_of, trainer_reporters, uncompiled
from headwise.monitor._alarms import Alarm, AlarmRule, Alarms
from headwise.monitor._step_statistics import StepStatistics, step_statistics
from headwise.watch import Recorder, Request, check_arguments


@runtime_checkable
class ScalarWriter(Protocol):
    """Anything that writes scalars as TensorBoard's `SummaryWriter` does."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object: ...


Log = ScalarWriter | Callable[[dict[str, float], int], object]


class TrainerEvents:
    """A callback of `transformers.Trainer` that ignores the events it has no method for."""

    if not TYPE_CHECKING:  # so that type checkers still find a misspelled name

        def __getattr__(self, name: str) -> Callable[..., None]:
            # A trainer calls a method for each of its events, and versions add events.
            if name.startswith("on_"):
                return lambda *_, **__: None
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


class HeadMonitor(TrainerEvents):
    """Statistics of every head during training, as scalars for a logger.

    Call `step()` after each optimizer step. The first step and every n-th are watched: 1, 100,
    200, … with `every=100`. A step covers all its forward passes, so the micro-batches of
    gradient accumulation count together. Only training passes count: those in training mode and
    with gradients. Layers that are recomputed for the backward pass count once. Outputs,
    gradients and random numbers equal those of unwatched training to the last bit; between
    watched steps no hooks of the monitor are on the model.

    The keys are `attn/L5.H3/entropy` for a head, `attn/L5/entropy/min` (`mean`, `max`) for a
    layer and `attn/entropy/min` (`mean`, `max`) for the model, each over the heads' values.
    `max_logit` of a head is its maximum over all queries, every other statistic the mean over
    queries; NaN if no query is eligible. With rules, `attn/alarms` counts the heads with an
    alarm, once for each rule.

    With `torch.distributed` every rank calls `step()`, and a watched step ends with one
    all_reduce, so scalars and alarms cover the whole batch on all ranks; `log` and `on_alarm`
    are called on rank 0 only. A compiled model runs uncompiled on the first watched step, and on
    all of them if its graphs cannot be followed (see `observe`).

    A monitor is a callback of `transformers.Trainer`, as in `callbacks=[HeadMonitor(model)]`. The
    trainer then counts the steps, and its `state.log_history` gets the scalars of the model.
    Without `log`, those of the model and of each layer go wherever its `report_to` says.

    Args:
        model: The module that training calls. Compile it, wrap it and freeze it first.
        every: How many optimizer steps from one watched step to the next.
        statistics: Names from `headwise.tables.STATISTICS`.
        layers: The layers to watch, counted from 0. None is all of them.
        rules: `Above` and `Below`: bounds whose violation raises an alarm.
        log: Receives all scalars of each watched step: a `SummaryWriter`, or any function of
            the scalars and the step. None leaves them to a trainer.
        on_alarm: Called with each `Alarm` when it goes off, `print` for example.
        group: The ranks that train on different texts. None is all of them.
    Attributes:
        steps: The number of optimizer steps so far.
        model: The model that is watched, without the wrappers that distribute or compile it.
        latest: The statistics of the latest step over all ranks; None if it was not watched.
        is_closed: Whether `close()` was called, or its `with` block has ended.
    Raises:
        ArgumentError: an argument has the wrong type or is out of range, a statistic is unknown,
            or a rule is on a statistic that is not watched.

    Example:
        >>> import torch
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
        every: SupportsIndex = 100,
        *,
        statistics: Sequence[str] = ("entropy", "max_logit", "first"),
        layers: Collection[SupportsIndex] | None = None,
        rules: Sequence[AlarmRule] = (),
        log: Log | None = None,
        on_alarm: Callable[[Alarm], object] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        model = check_model("HeadMonitor", model)
        numbers, self._every = check_arguments("HeadMonitor", layers, every)
        _check_arguments(statistics, rules, log, on_alarm)
        self.model, self.layers, self.group = unwrapped(model), numbers, group
        self.statistics = tuple(statistics)
        self.latest: StepStatistics | None = None
        self.steps, self.is_closed = 0, False
        self._log, self._on_alarm = log, on_alarm
        request = Request(self.statistics)
        self._recorder = Recorder(self.model, request, numbers, every=1, is_of_training=True)
        self._rules, self._alarms = tuple(rules), Alarms(rules)
        self._watched = 0
        self._reporters: list[Any] = []
        self._step_watch = StepWatch(self.model, self._recorder)
        # A monitor that is dropped, or still open when Python ends, leaves no hooks.
        weakref.finalize(self, self._step_watch.close)
        self._step_watch.open()

    @property
    def alarms(self) -> list[Alarm]:
        """The active alarms of the latest watched step, one for each broken rule."""
        return self._alarms.active(self._watched)

    def sites(self) -> list[Site]:
        """Where heads attend; then modules that were not captured, and why.

        Each site names its module and its layer.
        """
        return self._recorder.sites()

    def step(self) -> dict[str, float]:
        """Count an optimizer step that was just taken; every rank calls it.

        Returns:
            The scalars of the step if it was watched, else an empty dict.
        Raises:
            ArgumentError: the monitor is closed, or `layers` names a layer that does not exist.
            UnsupportedError: the step was watched and no attention was captured.
        """
        self._check_open("step")
        self.steps += 1
        self.latest = None
        watched, watch_next = self._step_watch.is_open, (self.steps + 1) % self._every == 0
        if not watch_next:
            self._step_watch.close()
        scalars = self._report() if watched else {}
        if watch_next:
            self._step_watch.open()
        return scalars

    def resume(self, steps: int) -> None:
        """Continue the count of a resumed training; the next step is watched.

        Passes since the latest step are dropped.

        Args:
            steps: The optimizer steps taken before.
        Raises:
            ArgumentError: the monitor is closed, or `steps` is not a whole number from 0 on.
        """
        self._check_open("resume")
        if isinstance(steps, bool) or not isinstance(steps, int | np.integer) or steps < 0:
            raise ArgumentError(
                f"HeadMonitor.resume: steps={steps!r}. Give a whole number, 0 or more."
            )
        self.steps = steps
        self.latest = None
        self._recorder.take_totals()
        self._step_watch.open()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called by `transformers.Trainer` first: continue the count of a resumed training.

        Raises:
            ArgumentError: the trainer trains another model.
        """
        trained = kwargs["model"]
        if not any(module is self.model for module in trained.modules()):
            raise ArgumentError(
                f"HeadMonitor: the trainer trains another {type(trained).__name__}, which is not "
                f"the {type(self.model).__name__} of this monitor. Give both the same model."
            )
        self.resume(state.global_step)
        self._reporters = trainer_reporters(args) if self._log is None else []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called by `transformers.Trainer` after an optimizer step.

        The scalars of the whole model go into the trainer's log history, unless `log` has put
        some there itself with `trainer.log`; those of the model and of layers to its reporters.
        """
        is_loss_due, rows = control.should_log, len(state.log_history)
        of_model = (*self.statistics, "alarms")
        reported = {k: x for k, x in self.step().items() if ".H" not in k}
        scalars = {k: x for k, x in reported.items() if k.split("/")[1] in of_model}
        for reporter in self._reporters if reported else ():
            reporter.on_log(args, state, control, logs=dict(reported), **kwargs)
        # The trainer takes any call of `trainer.log` for that of the loss, and would skip the loss.
        control.should_log = is_loss_due
        if scalars and len(state.log_history) == rows:
            step = {"step": state.global_step, "epoch": state.epoch}
            state.log_history.append(scalars | step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called by `transformers.Trainer` last: remove all hooks from the model.

        The monitor stays open for another training.
        """
        self._step_watch.close()
        for reporter in self._reporters:
            reporter.on_train_end(args, state, control, **kwargs)

    def close(self) -> None:
        """Remove all hooks from the model. Reported values stay readable."""
        self._step_watch.close()
        self.is_closed = True

    def __repr__(self) -> str:
        alarmed = sum(len(alarm.heads) for alarm in self.alarms)
        return (
            f"<HeadMonitor of {type(self.model).__name__}: every={self._every}, "
            f"steps={self.steps}, alarmed heads={alarmed}>"
        )

    def __enter__(self) -> "HeadMonitor":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _report(self) -> dict[str, float]:
        sites, totals = self._recorder.take_totals()
        self._check_captured(sites)
        statistics = step_statistics(sites, totals, device_of(self.model), self.group)
        self._watched, self.latest = self.steps, statistics
        new = self._alarms.update(self.steps, statistics)
        scalars = statistics.scalars()
        if self._rules:
            scalars["attn/alarms"] = float(sum(len(alarm.heads) for alarm in self.alarms))
        is_distributed = dist.is_available() and dist.is_initialized()
        if not is_distributed or dist.get_rank(self.group) == 0:
            if isinstance(self._log, ScalarWriter):
                for name, value in scalars.items():
                    self._log.add_scalar(name, value, self.steps)
            elif self._log is not None:
                self._log(dict(scalars), self.steps)
            if self._on_alarm is not None:
                for alarm in new:
                    self._on_alarm(alarm)
        return scalars

    def _check_captured(self, sites: Collection[Site]) -> None:
        """Refuse a watched step without attention, or without that of a chosen layer."""
        if not sites:
            raise UnsupportedError(
                f"HeadMonitor: no attention was captured in step {self.steps} of "
                f"{type(self.model).__name__}. Give the module that training calls, in training "
                f"mode and with gradients, and call step() after its forward pass."
            )
        missing = set(self.layers or ()) - {site.layer for site in sites}
        if missing:
            raise ArgumentError(
                f"HeadMonitor: layers {sorted(missing)} were not captured in step {self.steps}. "
                f"Name layers of the model, counted from 0."
            )

    def _check_open(self, method: str) -> None:
        if self.is_closed:
            raise ArgumentError(f"HeadMonitor.{method}: the monitor is closed. Make a new one.")


def _check_arguments(statistics: Any, rules: Any, log: Any, on_alarm: Any) -> None:
    """Refuse what is no rule, rules on what is not watched, and receivers that can't be called."""
    if isinstance(statistics, str) or not statistics:
        raise ArgumentError(f"HeadMonitor: statistics={statistics!r}. Give a list of names.")
    if not isinstance(rules, Sequence) or not all(isinstance(rule, AlarmRule) for rule in rules):
        raise ArgumentError(
            f"HeadMonitor: rules={rules!r}. Give a list of Above(...) and Below(...)."
        )
    for rule in rules:
        if rule.statistic not in statistics:
            raise ArgumentError(
                f"HeadMonitor: a rule is on {rule.statistic!r}, which is not watched. "
                f"Add it to statistics={tuple(statistics)}."
            )
    if not isinstance(log, ScalarWriter | None) and not callable(log):
        raise ArgumentError(
            f"HeadMonitor: log={log!r}. Give a SummaryWriter, or a function of the scalars and "
            f"the step."
        )
    if on_alarm is not None and not callable(on_alarm):
        raise ArgumentError(f"HeadMonitor: on_alarm={on_alarm!r}. Give a function of an alarm.")


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside wrappers that distribute or compile it."""
    inner = wrapped_by_compiler(model)
    if isinstance(model, DistributedDataParallel):
        inner = model.module
    return unwrapped(inner) if isinstance(inner, nn.Module) else model


class StepWatch:
    """Records the training passes of a model, and only those, while it is open.

    A training pass is a call of the model in training mode with gradients, so evaluation and
    generation between two steps do not count. All hooks are on the model during a pass only.
    Between passes there is a single hook, so that users' code there (optimizers, modes, a
    backward pass that computes layers again) runs undisturbed.

    A compiled model runs uncompiled in the first watched step, and in every one if its graphs
    cannot be followed. Afterwards the code that was compiled before is used again.
    """

    def __init__(self, model: nn.Module, recorder: Recorder) -> None:
        self._model, self._recorder = model, recorder
        self._step_hooks, self._pass_hooks = Hooks(compiled=True), Hooks(compiled=True)
        self.is_open = self._in_pass = False

    def open(self) -> None:
        recorder = self._recorder
        can_follow = recorder.can_follow_graphs()
        if self.is_open and can_follow and not recorder.capture.follows_graphs:
            self.close()
        if not self.is_open:
            self.is_open = True
            self._step_hooks.enter_context(
                recorder.following_graphs() if can_follow else uncompiled()
            )
            self._step_hooks.before(self._model, self._begin, with_kwargs=True)

    def close(self) -> None:
        self._end()
        self._step_hooks.close()
        self.is_open = False

    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not (model.training and torch.is_grad_enabled()) or self._in_pass:
            return
        earlier = set(forward_pre_hooks(model))
        self._in_pass = True
        try:
            self._pass_hooks.enter_context(self._recorder.recording())
            self._pass_hooks.after(model, self._end, always_call=True)
            # This pass has begun already, so it would not call hooks that are registered now.
            call_forward_pre_hooks(model, args, kwargs, skip=earlier)
        except BaseException:
            self._end()
            raise

    def _end(self, *_: Any) -> None:
        self._in_pass = False
        self._pass_hooks.close()
