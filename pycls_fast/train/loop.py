"""The training loop: when to log, evaluate, save and stop. What a step does is in `step.py`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from pycls_fast import build
from pycls_fast.config.schema import RunConfig
from pycls_fast.data.batch import Batch
from pycls_fast.data.prepare import to_device
from pycls_fast.errors import DONE, FAULT, STOPPED, Finished, UserError
from pycls_fast.parallel import Agreement, World, lost_ranks
from pycls_fast.train import checkpoint
from pycls_fast.train.display import Display
from pycls_fast.train.head import fit_head
from pycls_fast.train.health import DamagedImages, DivergenceCheck, enough_to_train, too_many_damaged
from pycls_fast.train.metrics import Clock, StepProfile, TrainMetrics, reset_memory_peak
from pycls_fast.train.resume import resume_notes
from pycls_fast.train.run import Run
from pycls_fast.train.signals import StopRequest, stop_requests
from pycls_fast.train.start import started
from pycls_fast.train.step_memory import StepMemory
from pycls_fast.train.trackers import Board, open_board
from pycls_fast.train.validation import Evaluations, summarise

# What ranks agree on after a step; the larger one counts.
_SAVE_FAILED, _STOP = 1, 2


class Stopped(Exception):
    """Raised when all ranks have agreed to stop because one of them got a signal."""


def train(
    config: RunConfig, on_start: Callable[[Path], None] = lambda run_dir: None, command: str | None = None
) -> int:
    """Train as configured; returns the exit status (0 done, 3 stopped by a signal with everything saved).

    Args:
        config: a checked configuration.
        on_start: called with the run's folder before the first step.
        command: what started the run, for its folder; None for this process's command line.

    Raises:
        UserError: a mistake in the configuration or the data, or a loss that is not finite.
        SystemExit: other ranks were lost; the status is 1, so that torchrun restarts all of them.
    """
    with build.world(config) as world:
        try:
            return _train(config, world, on_start, command)
        except RuntimeError as error:
            reason = lost_ranks(error) if world.size > 1 else None
            if reason is None:
                raise
            doing = f" while {world.monitor.doing}" if world.monitor is not None else ""
            print(f"error: rank {world.rank} lost other ranks{doing} ({reason})", file=sys.stderr, flush=True)
            # Not a result: leaving the world as usual would wait for the lost ranks.
            raise SystemExit(FAULT) from None


def _train(config: RunConfig, world: World, on_start: Callable[[Path], None], command: str | None) -> int:
    display = Display(speaks=world.is_main, mode=config.runtime.progress)
    reset_memory_peak(world.device)
    with stop_requests() as stop, started(config, world, display, command) as run:
        stop.training = True
        on_start(run.folder.path)
        with open_board(run) as board, display, run.saver:
            # From here on its configuration stays, even if the first step fails.
            run.folder.keep()
            status = board.status = Loop(run, stop, board).run_to_end()
            # It may still wait for its tracker.
            stop.finished = status == DONE
    if status == STOPPED:
        stop.call_launcher()
    return status


class Loop:
    """One pass from the run's first step to its last."""

    def __init__(self, run: Run, stop: StopRequest, board: Board) -> None:
        self.run = run
        self.stop = stop
        self.board = board
        self.agreement = Agreement(run.world)
        self.evaluations = Evaluations(run, board, self._stop_if_asked)
        self.metrics = TrainMetrics(run.world.device, read=run.switches.metrics)
        self.memory = StepMemory(run.world, compiled=run.switches.compile != "off")
        self.clock = Clock()
        self.profile = StepProfile(
            run.folder.path / "profile",
            run.config.runtime.profile_step if run.world.is_main else None,
            cuda=run.world.device.type == "cuda",
            display=run.display,
        )
        self.damaged = DamagedImages(run)
        self.divergence = DivergenceCheck(run)
        # A checkpoint was due when the state was not worth saving.
        self.owes_save = False

    def run_to_end(self) -> int:
        """Train, evaluate, save, summarise."""
        try:
            with enough_to_train(self.run.config, self.run.world):
                return self._run_to_end()
        except UserError:
            # The checkpoint that was written last, or still is, may be the best. If this fails, the first error counts.
            with suppress(Exception):
                self.run.finish_saving()
                if self.run.world.is_main:
                    self.evaluations.keep_if_best()
            raise

    def _run_to_end(self) -> int:
        run = self.run
        step = run.start_step
        try:
            if run.config.begins_with_probe and run.new_head and run.saved_step is None:
                fit_head(run, self._stop_if_asked)
            self._evaluate_if_left_out(step)
            if self.evaluations.stop_early(step):
                # An earlier process had stopped early, and nothing has changed since.
                run.total_steps = step
            compiles = run.switches.compile != "off"
            run.display.begin_training(step, run.total_steps, compiles=compiles)
            with closing(self._microbatches()) as microbatches, closing(self.profile):
                self.clock.start()
                for step in range(run.start_step, run.total_steps):
                    self.profile.before(step + 1)
                    self._train_step(step, microbatches)
                    self.profile.after(step + 1)
                    self._after_step(step + 1)
                    if self.evaluations.due(step + 1) and self.evaluations.stop_early(step + 1):
                        run.total_steps = step + 1
                        # Perhaps it was not worth saving before; no later step will be saved.
                        self._save(step + 1, always=True)
                        break
        except Stopped:
            return self._leave()
        return Finished(self._finish())

    def _microbatches(self) -> Generator[Batch, None, None]:
        run = self.run
        loader = build.train_loader(
            run.config, run.sources["train"], run.world, run.switches, start_step=run.start_step, steps=run.total_steps
        )
        mode = run.switches.input_copy
        yield from to_device(loader, run.world.device, mode=mode)

    def _train_step(self, step: int, microbatches: Iterator[Batch]) -> None:
        with self._compiling(), self.memory.counting(self.run.step):
            self.run.step(step, self._taken(step, microbatches), self.metrics)
        self.clock.add_step(self.run.config.data.global_batch_size)
        self.run.display.advance(step + 1)
        self.run.world.at(f"after step {step + 1}: agreeing whether to stop, logging")

    def _taken(self, step: int, microbatches: Iterator[Batch]) -> Iterator[Batch]:
        """The step's microbatches, each loaded when it is asked for."""
        world = self.run.world
        for _ in range(self.run.config.optim.microbatches):
            world.at(f"waiting for the data of step {step + 1}")
            asked = time.perf_counter()
            batch = next(microbatches)
            self.clock.add_wait(time.perf_counter() - asked)
            world.at(f"computing step {step + 1}")
            self.damaged.note(batch.damaged)
            yield batch

    def _after_step(self, done: int) -> None:
        run = self.run
        runtime = run.config.runtime
        if run.saver.done and not run.saver.failed:
            self._finish_saving(done)
        # All ranks repeat a save that failed after the same step, as they stop.
        reached = self.agreement.reached(_STOP if self.stop else _SAVE_FAILED if run.saver.failed else 0)
        stopping = reached == _STOP
        # Not if idle: the rank that failed reports it once more in the step in which all repeat the save.
        repeating = reached == _SAVE_FAILED and not run.saver.idle
        evaluating = self.evaluations.due(done)
        regular = runtime.checkpoint_every_steps and done % runtime.checkpoint_every_steps == 0
        saving = evaluating or regular or repeating
        logging = done % runtime.log_every_steps == 0 or saving or stopping
        numbers = self._numbers(done) if logging else {}
        record = self._log(done, numbers) if numbers and run.world.is_main else None
        saving = saving or (self.owes_save and logging and self.divergence.not_worth_saving() is None)
        if saving or stopping:
            run.world.at(f"saving step {done}")
            # Before the evaluation: a long one may be killed, and is repeated after the restart. Before anything is
            # printed: the terminal may have gone with whoever asked to stop.
            self._finish_saving(done)
            self._save(done, always=stopping or done == run.total_steps)
            if not runtime.checkpoint_async:
                self._finish_saving(done)
        if record is not None:
            self._show(record)
        if numbers.get("damaged"):
            self._report_damage(done)
        if stopping:
            self._finish_saving(done)
            raise Stopped
        if evaluating:
            self._evaluate(done)
        if saving:
            self.clock.start()

    def _save(self, done: int, *, always: bool) -> None:
        """Start saving a step, unless it is saved or, without `always`, not worth it."""
        if self.run.saved_step == done:
            return
        reason = None if always else self.divergence.not_worth_saving()
        self.owes_save = reason is not None
        if reason is not None:
            self.run.display.warn(f"step {done:,} is not saved yet: {reason}")
            return
        self.divergence.check_weights(done)
        self.run.save(done)
        self.divergence.saved()

    def _numbers(self, done: int) -> dict[str, float]:
        """Read and check the numbers since the last call; all ranks call this."""
        numbers = self.metrics.read(self.run.world, damaged=len(self.damaged.noted), waited=self.clock.waited)
        steps = self.clock.steps
        numbers |= self.clock.read(numbers["waited"])
        self.divergence.check(done, numbers["loss"], int(numbers["skipped_steps"]), steps)
        return numbers

    def _log(self, done: int, numbers: Mapping[str, float]) -> dict[str, Any]:
        """Record the numbers; on the main rank."""
        run = self.run
        extra: dict[str, Any] = {}
        if run.step.scaler.is_enabled():
            extra = {"loss_scale": run.step.scaler.get_scale(), "skipped_steps": int(numbers["skipped_steps"])}
        return run.folder.add_record(
            "train",
            done,
            run.epoch(done),
            loss=numbers["loss"],
            lr=run.step.schedule(done - 1),
            grad_norm=numbers["grad_norm"],
            **{name: numbers[name] for name in ("images_per_second", "step_seconds", "data_wait_fraction")},
            memory_peak_bytes=self.memory.bytes(),
            **extra,
        )

    def _show(self, record: Mapping[str, Any]) -> None:
        run = self.run
        left = (run.total_steps - record["step"]) * record["step_seconds"]
        run.display.training(record, run.total_steps, epochs=run.config.schedule.epochs, seconds_left=left)
        self.board.add(record)

    def _report_damage(self, done: int) -> None:
        """Report the damaged images that any rank has noted; all ranks call this."""
        run = self.run
        self.damaged.report(done)
        limit = run.config.data.max_damaged
        if len(run.damaged) > limit:
            # So that the run can be resumed from here with a higher limit, or with the images repaired.
            self._finish_saving(done)
            self._save(done, always=True)
            self._finish_saving(done)
            raise too_many_damaged(run.damaged, limit)

    def _evaluate_if_left_out(self, start: int) -> None:
        """Do the evaluation for which an earlier process saved a checkpoint but which it did not finish."""
        if self.evaluations.due(start) and not self.evaluations.has(start):
            self.evaluations.forget(start)
            self._evaluate(start)
        elif self.run.world.is_main:
            # That process may have been killed between recording the evaluation and linking the checkpoint. This one
            # may have other steps at which an evaluation is due.
            self.evaluations.keep_if_best()

    def _evaluate(self, done: int) -> None:
        if self.run.saved_step != done:
            # As before saving: what is scored is what is saved.
            self.run.sync_buffers()
        try:
            with self._compiling():
                damaged = self.evaluations.take(done)
        except Stopped:
            # The evaluation has not changed the state, which was perhaps not worth saving before.
            self._save(done, always=True)
            raise
        # Without its checkpoint, this evaluation could not be the best. A run that begins with a checkpoint of another
        # folder has none of this step, either.
        if self.evaluations.finite and self.divergence.not_worth_saving(evaluated=True) is None:
            self._save(done, always=True)
        self.damaged.note(damaged.items())
        self._report_damage(done)
        if self.run.world.is_main:
            if self.run.saver.idle:
                # Else `_finish_saving` does it: training does not wait for the checkpoint that is being written.
                self.evaluations.keep_if_best()
            self.evaluations.draw_if_due()

    def _finish_saving(self, done: int) -> None:
        """Wait for the checkpoint that is being written (see `Run.complete_saving`), and link it if it is the best."""
        if self.run.complete_saving(done, self.divergence.check_weights) and self.run.world.is_main:
            self.evaluations.keep_if_best()

    @contextmanager
    def _compiling(self) -> Iterator[None]:
        """Take a failed compilation after a stop signal for the stop: Ctrl-C has ended the compiler's process, too.

        What was to be compiled has not changed the weights. Only with one rank: others may have compiled, and wait.
        """
        try:
            yield
        except RuntimeError as error:
            # By its name: importing the class would import the compiler.
            alone = self.run.world.size == 1
            if alone and self.stop and type(error).__module__.startswith("torch._inductor"):
                raise Stopped from error
            raise

    def _stop_if_asked(self) -> None:
        if self.agreement.reached(_STOP if self.stop else 0) == _STOP:
            raise Stopped

    def _leave(self) -> int:
        run = self.run
        # An evaluation that was stopped has not changed the state, which was saved before it or as it stopped.
        self._finish_saving(run.saved_step or 0)
        if run.world.is_main:
            newest = next(checkpoint.checkpoints(run.folder.checkpoints), None)
            step = 0 if newest is None else checkpoint.step_of(newest)
            run.folder.add_record("event", step, run.epoch(step), event="stopped", signal=self.stop.name)
            run.display.note(
                f"stopped by {self.stop.name or 'a signal to another rank'}; everything up to step {step} is saved"
            )
            for note in resume_notes(run):
                run.display.note(note)
            # Last: a launcher may kill this, and everything else is done.
            try:
                self.evaluations.draw()
            except UserError as error:
                run.display.warn(error.lines[0])
        return STOPPED

    def _finish(self) -> float | None:
        """Write the summary; returns the result of `summarise` on all ranks, once it is written."""
        run = self.run
        self._finish_saving(run.total_steps)
        memory = max(run.world.gather(self.memory.bytes()))
        # The other ranks wait: their script may read the summary next.
        result = summarise(run, self.evaluations, self.clock, memory) if run.world.is_main else None
        return run.world.from_main(result)
