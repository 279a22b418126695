"""The rounds of a fit in which each rank trains by itself (`local_sgd_steps`)."""

from trainer_lib.local_sgd import DiLoCo, LocalSGD
from trainer_lib.trainer.fit.context import FitContext


def local_rounds(context: FitContext) -> LocalSGD:
    """Return the rounds that the arguments ask for; without `local_sgd_steps`, and in a tool, they are not enabled."""
    args, accelerator, models = context.run.args, context.accelerator, context.models
    if args.local_sgd_steps is None or context.in_sandbox:
        return LocalSGD(accelerator, models, 1, enabled=False)
    if args.outer_learning_rate is None:
        return LocalSGD(accelerator, models, args.local_sgd_steps)
    momentum = {} if args.outer_momentum is None else {"outer_momentum": args.outer_momentum}
    return DiLoCo(accelerator, models, args.local_sgd_steps, args.outer_learning_rate, **momentum)
