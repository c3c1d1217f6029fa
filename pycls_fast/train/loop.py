"""The training loop: when to log, evaluate, save and stop. What a step does is in `step.py`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from pycls_fast import build
from pycls_fast.config.run import RunConfig
from pycls_fast.data.batch import Batch
from pycls_fast.data.prepare import to_device
from pycls_fast.errors import DONE, FAULT, STOPPED, Finished, UserError
from pycls_fast.files import checkpoints, step_of
from pycls_fast.parallel.rendezvous import lost_ranks
from pycls_fast.parallel.world import Agreement, World
from pycls_fast.train.display import Display
from pycls_fast.train.divergence import DivergenceCheck
from pycls_fast.train.environment import Call
from pycls_fast.train.head import fit_head
from pycls_fast.train.metrics import Clock, StepMemory, StepProfile, TrainMetrics, reset_memory_peak
from pycls_fast.train.observers import Observers, open_observers
from pycls_fast.train.out_of_memory import enough_to_score, enough_to_train
from pycls_fast.train.pictures import draw_batch
from pycls_fast.train.resume import resume_notes
from pycls_fast.train.run_state import Run
from pycls_fast.train.signals import Stopped, StopRequest, stop_requests
from pycls_fast.train.start import start_run
from pycls_fast.train.summary import summarise
from pycls_fast.train.validation import Evaluations


def train(config: RunConfig, on_start: Callable[[Path], None] = lambda run_dir: None, call: Call | None = None) -> int:
    """Train as configured; returns the exit status (0 done, 3 stopped by a signal with everything saved).

    Args:
        on_start: called with the run's folder before the first step.
        call: what started the run, for its folder; None for this process's command line.

    Raises:
        UserError: a mistake in the configuration or the data, or a loss that is not finite.
        SystemExit: other ranks were lost; the status is 1, so that torchrun restarts all of them.
    """
    with build.world(config) as world:
        try:
            return _train(config, world, on_start, call)
        except RuntimeError as error:
            reason = lost_ranks(error) if world.size > 1 else None
            if reason is None:
                raise
            doing = f" while {world.monitor.doing}" if world.monitor is not None else ""
            print(f"error: rank {world.rank} lost other ranks{doing} ({reason})", file=sys.stderr, flush=True)
            # Not a result: leaving the world as usual would wait for the lost ranks.
            raise SystemExit(FAULT) from None


def _train(config: RunConfig, world: World, on_start: Callable[[Path], None], call: Call | None) -> int:
    display = Display(speaks=world.is_main, mode=config.runtime.progress)
    reset_memory_peak(world.device)
    with (
        stop_requests() as stop,
        start_run(config, replace(world, while_waiting=partial(stop.check, world.size)), display, call) as run,
    ):
        stop.training = True
        on_start(run.folder.path)
        memory = enough_to_train(run.config, run.world, len(run.classes))
        with open_observers(run) as observers, display, run.saver, memory:
            # From here on its configuration stays, even if the first step fails.
            run.folder.keep()
            if world.is_main:
                display.keep_log(run.folder.open_log())
            status = observers.status = Loop(run, stop, observers).run_to_end()
            # It may still wait for its tracker.
            stop.finished = status == DONE
    if status == STOPPED:
        stop.call_launcher()
    return status


class Loop:
    """One pass from the run's first step to its last."""

    def __init__(self, run: Run, stop: StopRequest, observers: Observers) -> None:
        self.run = run
        self.stop = stop
        self.observers = observers
        self.agreement = Agreement(run.world)
        self.evaluations = Evaluations(run, observers, self._stop_if_asked)
        self.metrics = TrainMetrics(run.world.device, read=run.switches.metrics)
        self.memory = StepMemory(run.world, compiled=build.compiles(run.config, run.switches))
        self.clock = Clock()
        # Of the latest one.
        self.evaluation_seconds = 0.0
        self.profile = StepProfile(
            run.folder.path / "profile",
            run.config.runtime.profile_step if run.world.is_main else None,
            cuda=run.world.device.type == "cuda",
            display=run.display,
        )
        self.divergence = DivergenceCheck(run)

    def run_to_end(self) -> int:
        run = self.run
        try:
            self._begin()
            with closing(self._microbatches()) as microbatches, closing(self.profile):
                batches = self._draw_first(microbatches) if run.start_step < run.total_steps else microbatches
                self.clock.start()
                for step in range(run.start_step, run.total_steps):
                    try:
                        self._train_step(step, batches)
                    except Stopped:
                        # It waited for data; what it has changed before is batch norm's statistics at most.
                        if step > run.start_step:
                            self._save(step, always=True)
                        raise
                    self._do_what_is_due(step + 1)
                    if step + 1 == run.total_steps:
                        # It may have become the last one: early stopping.
                        break
        except Stopped:
            return self._finish_stopped()
        return Finished(self._finish())

    def _do_what_is_due(self, done: int) -> None:
        """Log, save and evaluate after a step, and stop if a signal has asked for it; the same on all ranks."""
        run, runtime = self.run, self.run.config.runtime
        stop, evaluate = self.agreement.reached(int(bool(self.stop))) > 0, self.evaluations.due(done)
        save = stop or evaluate or bool(runtime.checkpoint_every_steps and done % runtime.checkpoint_every_steps == 0)
        if save or done % runtime.log_every_steps == 0:
            self._log(done)
        if save:
            # Before the evaluation: a long one may be killed, and is repeated after the restart.
            self._save(done, always=stop or done == run.total_steps)
        if stop:
            raise Stopped
        if evaluate:
            self._evaluate(done)
            if self.evaluations.stop_early(done):
                run.total_steps = done
                # Perhaps it was not saved before; no later step will be.
                self._save(done, always=True)
        if save:
            self.clock.start()

    def _begin(self) -> None:
        """Do what comes before the first step: the fit of a new head, and an evaluation that is missing."""
        run = self.run
        if run.fits_head:
            with enough_to_score(run.config, run.world):
                fit_head(run, run.scorer(self._stop_if_asked), self.stop.check, self._report_head)
        start = run.start_step
        if self.evaluations.due(start) and not (self.evaluations.has(start) and run.saved_step == start):
            # The earlier process did not finish it, or not write its checkpoint.
            if run.world.is_main:
                run.folder.drop_evaluation(start)
            self._evaluate(start)
        else:
            # That process may have been killed between recording the evaluation and linking the checkpoint. This one
            # may have other steps at which an evaluation is due.
            self.evaluations.keep_if_best()
        if self.evaluations.stop_early(start):
            # An earlier process had stopped early, and nothing has changed since.
            run.total_steps = start
        run.display.begin_training(start, run.total_steps, compiles=run.switches.compile != "off")

    def _report_head(self, line: str, **numbers: float) -> None:
        self.run.display.note(line)
        self.run.add_record("event", 0, event="head fitted", **numbers)

    def _microbatches(self) -> Generator[Batch, None, None]:
        run, train, switches = self.run, self.run.sources["train"], self.run.switches
        steps = {"start_step": run.start_step, "steps": run.total_steps}
        loader = build.train_loader(run.config, train, run.world, switches, **steps)
        yield from to_device(loader, run.world.device, mode=switches.input_copy)

    def _draw_first(self, microbatches: Iterator[Batch]) -> Iterator[Batch]:
        """Draw the run's first microbatch; returns all of them. The clock does not count the start of the loader."""
        run = self.run
        run.world.at(f"waiting for the data of step {run.start_step + 1}")
        first = next(microbatches)
        if run.start_step == 0 and run.world.is_main:
            draw_batch(run, first)
        return chain([first], microbatches)

    def _train_step(self, step: int, microbatches: Iterator[Batch]) -> None:
        with self.profile.around(step + 1), self.memory.counting(self.run.step.persistent_tensors):
            self.run.step(step, self._microbatches_of(step, microbatches), self.metrics)
        self.clock.add_step(self.run.config.data.global_batch_size)
        self.run.display.advance(step + 1)
        self.run.world.at(f"after step {step + 1}: agreeing whether to stop, logging")
        if self.run.saver.written:
            # Written meanwhile by its thread.
            self._finish_saving(step + 1)

    def _microbatches_of(self, step: int, microbatches: Iterator[Batch]) -> Iterator[Batch]:
        """The microbatches of one step, each loaded when it is asked for."""
        world = self.run.world
        for _ in range(self.run.config.optim.microbatches):
            world.at(f"waiting for the data of step {step + 1}")
            asked = time.perf_counter()
            batch = next(microbatches)
            self.clock.waited += time.perf_counter() - asked
            world.at(f"computing step {step + 1}")
            self.run.damaged.note(batch)
            yield batch

    def _log(self, done: int) -> None:
        """Read and check the numbers since the last call, record and show them; all ranks call this."""
        run = self.run
        numbers, steps = self.metrics.read(run.world), self.clock.steps
        numbers |= self.clock.read(run.world)
        self.divergence.check(done, numbers["loss"], int(numbers["skipped_steps"]), steps)
        if run.world.is_main:
            record = self._record(done, numbers)
            left = self._seconds_left(done, record["step_seconds"])
            run.display.training(record, run.total_steps, epochs=run.config.schedule.epochs, seconds_left=left)
            self.observers.add(record)
        self._report_damaged(done)

    def _seconds_left(self, done: int, step_seconds: float) -> float:
        """What the steps after this one take, and the evaluations from this one on if one has been timed."""
        run = self.run
        every = build.steps_between_evaluations(run.config, run.steps_per_epoch)
        evaluations = -(-run.total_steps // every) - (done - 1) // every
        return (run.total_steps - done) * step_seconds + evaluations * self.evaluation_seconds

    def _record(self, done: int, numbers: Mapping[str, Any]) -> dict[str, Any]:
        step = self.run.step
        values = {"loss": numbers["loss"], "lr": step.schedule(done - 1), "grad_norm": numbers["grad_norm"]}
        values |= {name: numbers[name] for name in ("images_per_second", "step_seconds", "data_wait_fraction")}
        values["memory_peak_bytes"] = self.memory.bytes()
        if step.scaler.is_enabled():
            values |= {"loss_scale": step.scaler.get_scale(), "skipped_steps": int(numbers["skipped_steps"])}
        return self.run.add_record("train", done, **values, **numbers["facts"])

    def _save(self, done: int, *, always: bool = False) -> None:
        """Save a step, unless it is saved or, without `always`, its loss is not finite."""
        run = self.run
        if run.saved_step != done:
            run.world.at(f"saving step {done}")
            # If the one before failed, this step is saved in its place.
            self._finish_saving(done)
        if run.saved_step == done:
            return
        if not (always or self.divergence.finite):
            run.display.warn(f"step {done:,} is not saved: the loss is not finite")
            return
        self.divergence.check_weights(done)
        run.save(done)
        if not run.config.runtime.checkpoint_async:
            self._finish_saving(done)

    def _report_damaged(self, done: int) -> None:
        try:
            self.run.damaged.report(done)
        except UserError:
            # So that the run can be resumed from here with a higher limit, or with the images repaired.
            self._save(done, always=True)
            self._finish_saving(done)
            raise

    def _evaluate(self, done: int) -> None:
        if self.run.saved_step != done:
            # As before saving: what is scored is what is saved.
            self.run.sync_buffers()
        began = time.perf_counter()
        try:
            finite = self.evaluations.evaluate(done)
        except Stopped:
            # The evaluation has not changed the state, which perhaps was not saved before it.
            self._save(done, always=True)
            raise
        self.evaluation_seconds = time.perf_counter() - began
        # Without its checkpoint, this evaluation could not be the best: of a run that begins with a checkpoint of
        # another folder, or if an image has overflowed in training.
        if finite:
            self._save(done, always=True)
        self._report_damaged(done)
        if self.run.saver.idle:
            # Else `_finish_saving` does it: training does not wait for the checkpoint that is being written.
            self.evaluations.keep_if_best()
        self.evaluations.draw_if_due()

    def _finish_saving(self, done: int) -> None:
        """Wait for the checkpoint that is being written, and link it if it is the best.

        If it cannot be written, this step is saved instead (a `UserError` on all ranks if that fails, too): one write
        that fails on one of many ranks, for example while a file server is restarted, does not end the run.
        """
        run = self.run
        try:
            path = run.saver.finish()
        except UserError as error:
            run.display.warn(f"{error}; saving step {done:,} instead")
            self.divergence.check_weights(done)
            run.save(done)
            path = run.saver.finish()
        if path is not None:
            # If only the main rank fails here, no other one would save again.
            run.record_saved(path)
            self.evaluations.keep_if_best()

    def _stop_if_asked(self) -> None:
        if self.agreement.reached(int(bool(self.stop))):
            raise Stopped

    def _finish_stopped(self) -> int:
        """End a run that a signal has stopped: say how it resumes, and write the summary of what is saved."""
        run = self.run
        # An evaluation that was stopped has not changed the state, which was saved before it or as it stopped.
        self._finish_saving(run.saved_step or 0)
        memory = max(run.world.gather(self.memory.bytes()))
        if run.world.is_main:
            newest = next(checkpoints(run.folder.checkpoints), None)
            step = 0 if newest is None else step_of(newest)
            signal = self.stop.name or "a signal to another rank"
            run.add_record("event", step, event="stopped", signal=self.stop.name)
            run.display.note(f"stopped by {signal}; everything up to step {step} is saved")
            for note in resume_notes(run):
                run.display.note(note, whole=True)
            # Last: a launcher may kill this, and everything else is done.
            try:
                summarise(run, self.observers, memory, stopped=(signal, step))
            except UserError as error:
                run.display.warn(error.lines[0])
        return STOPPED

    def _finish(self) -> float | None:
        """Write the summary; returns the result of `summarise` on all ranks, once it is written."""
        run = self.run
        self._finish_saving(run.total_steps)
        memory = max(run.world.gather(self.memory.bytes()))
        # The other ranks wait: their script may read the summary next.
        result = summarise(run, self.observers, memory) if run.world.is_main else None
        return run.world.from_main(result)
