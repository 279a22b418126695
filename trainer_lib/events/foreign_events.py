"""Events of other libraries' callbacks, with the event to listen to here."""

from collections.abc import Iterable

from trainer_lib.foundation.errors import did_you_mean

# Of Hugging Face's Trainer, Lightning, Keras and pytorch-accelerated.
RENAMED: dict[str, str] = {
    "on_train_begin": "on_fit_begin",
    "on_train_start": "on_fit_begin",
    "on_fit_start": "on_fit_begin",
    "on_training_run_start": "on_fit_begin",
    "on_init_end": "on_fit_begin",
    "on_train_end": "on_fit_end",
    "on_training_run_end": "on_fit_end",
    "on_train_epoch_start": "on_epoch_begin",
    "on_train_epoch_begin": "on_epoch_begin",
    "on_epoch_start": "on_epoch_begin",
    "on_training_run_epoch_end": "on_epoch_end",
    "on_train_epoch_end": "on_epoch_end",
    "on_batch_begin": "on_step_begin",
    "on_batch_start": "on_step_begin",
    "on_train_batch_begin": "on_step_begin",
    "on_train_batch_start": "on_step_begin",
    "on_train_step_begin": "on_step_begin",
    "on_batch_end": "on_step_end",
    "on_train_batch_end": "on_step_end",
    "on_train_step_end": "on_step_end",
    "on_substep_end": "on_micro_batch_end",
    "on_before_backward": "on_loss",
    "on_after_backward": "on_backward_end",
    "on_pre_optimizer_step": "on_optimizer_step_begin",
    "on_before_optimizer_step": "on_optimizer_step_begin",
    "on_optimizer_step": "on_optimizer_step_end",
    "on_before_zero_grad": "on_optimizer_step_end",
    "on_evaluate": "on_evaluate_end",
    "on_prediction_step": "on_evaluate_batch_end",
    "on_test_begin": "on_evaluate_begin",
    "on_test_start": "on_evaluate_begin",
    "on_test_epoch_start": "on_evaluate_begin",
    "on_sanity_check_start": "on_evaluate_begin",
    "on_validation_start": "on_evaluate_begin",
    "on_validation_epoch_start": "on_evaluate_begin",
    "on_eval_epoch_start": "on_evaluate_begin",
    "on_test_end": "on_evaluate_end",
    "on_test_epoch_end": "on_evaluate_end",
    "on_sanity_check_end": "on_evaluate_end",
    "on_validation_end": "on_evaluate_end",
    "on_validation_epoch_end": "on_evaluate_end",
    "on_eval_epoch_end": "on_evaluate_end",
    "on_test_batch_start": "on_evaluate_batch_begin",
    "on_validation_batch_start": "on_evaluate_batch_begin",
    "on_test_batch_end": "on_evaluate_batch_end",
    "on_validation_batch_end": "on_evaluate_batch_end",
    "on_eval_step_end": "on_evaluate_batch_end",
    "on_predict_start": "on_predict_begin",
    "on_predict_epoch_start": "on_predict_begin",
    "on_predict_batch_start": "on_predict_batch_begin",
    "on_predict_epoch_end": "on_predict_end",
    "on_save": "on_save_end",
    "on_save_checkpoint": "on_save_begin",
    "on_load_checkpoint": "on_load_end",
    "on_keyboard_interrupt": "on_interrupt",
}

# Of fastai and Composer, whose names have no prefix.
UNPREFIXED: dict[str, str] = {
    "before_fit": "on_fit_begin",
    "before_epoch": "on_epoch_begin",
    "before_train": "on_epoch_begin",
    "before_batch": "on_micro_batch_begin",
    "after_loss": "on_loss",
    "before_backward": "on_loss",
    "after_backward": "on_backward_end",
    "before_step": "on_optimizer_step_begin",
    "after_step": "on_optimizer_step_end",
    "after_batch": "on_micro_batch_end",
    "after_train": "on_epoch_end",
    "before_validate": "on_evaluate_begin",
    "after_validate": "on_evaluate_end",
    "after_epoch": "on_epoch_end",
    "after_fit": "on_fit_end",
    "fit_start": "on_fit_begin",
    "epoch_start": "on_epoch_begin",
    "batch_start": "on_step_begin",
    "batch_end": "on_step_end",
    "epoch_end": "on_epoch_end",
    "eval_start": "on_evaluate_begin",
    "eval_end": "on_evaluate_end",
    "eval_batch_end": "on_evaluate_batch_end",
    "fit_end": "on_fit_end",
}

# Of Lightning, beside its events, where a parameter is called `stage`.
OF_STAGES: dict[str, str] = {"setup": "on_fit_begin", "teardown": "on_fit_end"}


def instead_of(name: str, events: Iterable[str]) -> str:
    """Return which event to listen to instead of one that does not exist; an empty string if none is near."""
    return f" Listen to {RENAMED[name]}." if name in RENAMED else did_you_mean(name, events)
