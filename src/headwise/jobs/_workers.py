"""Processes that compute the unfinished shards of a job on one machine."""

import gc
import pickle
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol, runtime_checkable

import torch
from torch import multiprocessing

from headwise._progress import Progress
from headwise.errors import ArgumentError, HeadwiseError, WorkerError
from headwise.jobs._run_folder import ranges


@runtime_checkable
class ShardedJob(Protocol):
    """What workers need of a job."""

    @property
    def shards(self) -> int:
        """The number of shards."""

    def unfinished(self) -> list[int]:
        """The shards that have no result yet."""

    def open(self, worker: int) -> Any:
        """The model in this process."""

    def compute_unclaimed(self, shard: int, opened: Any) -> bool:
        """Compute a shard; False if another process does."""


def compute_all(job: ShardedJob, on_progress: Progress) -> None:
    """Compute every unfinished shard in this process, with one thread."""
    with _one_thread():
        _compute_unfinished(job, 0, lambda: _report(job, on_progress))


def compute_with(job: ShardedJob, workers: int, on_progress: Progress) -> None:
    """Compute every unfinished shard in processes of their own.

    Raises:
        ArgumentError: the job cannot be sent to another process, or this process is a
            worker that such a call is starting.
        WorkerError: a worker was killed before all shards were finished.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ArgumentError(
            f"CorpusJob.run: workers={workers} in a script that each worker runs again. Put the "
            f'call under if __name__ == "__main__":.'
        )
    workers = min(workers, len(job.unfinished()))
    context = multiprocessing.get_context("spawn")
    processes: list[Any] = []
    pipes: list[Any] = []
    try:
        for number in range(workers):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(job, number, sender), daemon=True)
            _start(process)
            sender.close()  # so that the pipe ends with the worker
            processes.append(process)
            pipes.append(receiver)
        errors = _collect(pipes, lambda: _report(job, on_progress))
    except BaseException:
        for process in processes:
            process.terminate()
        raise
    finally:
        for process in processes:
            process.join()
    if errors:
        raise errors[0]
    _check_finished(job, processes)


def _start(process: Any) -> None:
    try:
        process.start()
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ArgumentError(
            f"CorpusJob.run: the job cannot be sent to workers ({error}). Give the model's folder "
            f"in place of the model, and functions that a module defines."
        ) from error


def _collect(pipes: list[Any], on_shard: Callable[[], None]) -> list[HeadwiseError]:
    """Follow the workers until all have ended; the errors that they reported."""
    errors: list[HeadwiseError] = []
    while pipes:
        ready: list[Any] = wait(pipes)
        for pipe in ready:
            try:
                message = pipe.recv()
            except EOFError:
                pipes.remove(pipe)
                continue
            if isinstance(message, HeadwiseError):
                errors.append(message)
            else:
                on_shard()
    return errors


def _check_finished(job: ShardedJob, processes: list[Any]) -> None:
    missing = job.unfinished()
    ends = [f"worker {n} {_end_of(p.exitcode)}" for n, p in enumerate(processes) if p.exitcode]
    if missing and ends:  # without such ends, other processes compute what is missing
        raise WorkerError(
            f"CorpusJob.run: {', '.join(ends)}; missing are the shards {ranges(missing)}. Finished "
            f"shards are kept: run the job again."
        )


def _end_of(code: int) -> str:
    if code < 0:
        return f"was killed ({signal.Signals(-code).name})"
    return f"ended with code {code}"


def _work(job: ShardedJob, number: int, sender: Connection) -> None:
    """The main function of a worker: our errors are sent, others show their traceback."""
    # The parent ends the workers when it is interrupted.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with _one_thread():
            _compute_unfinished(job, number, lambda: sender.send(None))
    except HeadwiseError as error:
        sender.send(error)


def _compute_unfinished(job: ShardedJob, worker: int, on_shard: Callable[[], None]) -> None:
    """Compute shards that no other process computes, until none is left."""
    opened = None
    any_computed = True
    while any_computed:
        any_computed = False
        for shard in job.unfinished():
            opened = opened or job.open(worker)
            with _garbage_collected():
                computed = job.compute_unclaimed(shard, opened)
            if computed:
                any_computed = True
                on_shard()


@contextmanager
def _garbage_collected() -> Iterator[None]:
    """Collect the cycles that each watch leaves; Python does so late in a large process.

    Objects that exist before, most of them of libraries, are not searched.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.collect()
        gc.unfreeze()


def _report(job: ShardedJob, on_progress: Progress) -> None:
    on_progress(job.shards - len(job.unfinished()), job.shards)


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
