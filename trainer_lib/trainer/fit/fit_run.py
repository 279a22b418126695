"""What `Trainer.fit` does: find where to begin, train, and end the run, whatever happens."""

from contextlib import ExitStack

from trainer_lib.events import Control
from trainer_lib.filesystem.remote_paths import AnyPath
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.processes.exit_codes import Interrupted, is_interactive
from trainer_lib.runs.run_lease import Lease
from trainer_lib.trainer import defaults
from trainer_lib.trainer.arguments import value_checks
from trainer_lib.trainer.checkpoints.find_resume_point import ResumePoint, find_resume_point
from trainer_lib.trainer.checks import before_fit
from trainer_lib.trainer.fit.accelerator_setup.build_accelerator import numerics
from trainer_lib.trainer.fit.session import FitSession
from trainer_lib.trainer.fit.train_loop import TrainLoop
from trainer_lib.trainer.result import FitResult
from trainer_lib.trainer.safety.hang_watchdog import watched
from trainer_lib.trainer.safety.signals import Signals
from trainer_lib.trainer.trainer_interface import TrainerInterface, forget_prepared


def fit(trainer: TrainerInterface, resume: str | AnyPath | None = None) -> FitResult:
    """Train; see `Trainer.fit`."""
    if trainer.run.state.status == "running":
        raise ConfigurationError(
            "fit() was called while it runs, by a callback or in another thread. Call it after it returned, or make "
            "another Trainer."
        )
    before_fit.check(trainer)
    args = trainer.args
    resume_point, lease = find_resume_point(
        args.output_folder,
        args.run_name,
        str(args.resume) if resume is None else value_checks.resume("resume", resume),
        trainer.accelerator.group,
        defaults.run_fingerprint(trainer),
    )
    with lease, numerics(args), ExitStack() as at_end:
        if resume_point.checkpoint is not None:
            from trainer_lib.checkpointing.load.local_files import forget_checked

            at_end.callback(forget_checked)
        _begin(trainer, resume_point)
        if resume_point.is_finished and resume_point.folder is not None:
            from trainer_lib.trainer.checkpoints.finished_runs import load_finished

            return load_finished(trainer, resume_point.folder, resume_point.checkpoint)
        return _train(trainer, resume_point, lease)


def _begin(trainer: TrainerInterface, resume_point: ResumePoint) -> None:
    parts = trainer.parts
    parts.run_folder = None if resume_point.folder is None else resume_point.folder.path
    if parts.has_fitted:  # a second fit keeps the weights and resets everything else
        _forget_last(trainer)
    parts.has_fitted = True
    parts.means.clear()


def _forget_last(trainer: TrainerInterface) -> None:
    """Forget the last fit; weights that are sharded, which nothing puts together again, stay prepared."""
    from trainer_lib.modules.module_kinds import model_has_dtensor

    if not any(model_has_dtensor(model) for model in trainer.parts.models.listed):
        trainer.parts.models.unfreeze()
        forget_prepared(trainer)
        return
    trainer.accelerator.prepared.keep_models()
    trainer.accelerator.window.reset()
    trainer.parts.forget_evaluator()


def _train(trainer: TrainerInterface, resume_point: ResumePoint, lease: Lease) -> FitResult:
    args, folder = trainer.args, resume_point.folder
    signals = Signals(args.stop_signals, Control(), trainer.accelerator.is_main_process)
    stacks = None if folder is None else folder.here
    with signals, watched(trainer.accelerator, args.hang_timeout_seconds, stacks) as follow:
        session = FitSession(trainer, folder, signals, lease)
        trainer.run = session.run
        trainer.parts.guard = session.guard if session.guard.reads_losses else None
        status = "failed"
        try:
            session.begin(resume_point.checkpoint, is_unfinished=resume_point.is_unfinished)
            follow(session.run)
            session.loop(TrainLoop).train()
            if session.owed.interruption is None:
                session.end.finish()
            status = session.run.state.status
        except KeyboardInterrupt:
            status = "interrupted"
            session.saver.close()  # first, so that on_interrupt sees all checkpoints
            trainer.events.fire("on_interrupt", session.run)
            raise
        except BaseException as error:
            session.saver.close()
            trainer.events.fire("on_exception", session.run, error)
            raise
        finally:
            session.close(status)
    result, agreed = session.end.result(), session.owed.interruption
    if agreed is not None and not is_interactive():
        session.end.leave_together()
    signals.hand_on()
    # A signal in on_fit_end ends this rank alone: another one may be there for long, and none waits for it.
    interruption = agreed or session.run.control.interruption
    if interruption is not None and not is_interactive():
        raise Interrupted(interruption, result)
    if result.status == "unsaved":
        raise session.saver.unsaved_error(result)
    return result
