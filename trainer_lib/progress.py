"""This file is the progress bar of one process, where many would print over one another."""

from typing import TYPE_CHECKING, Any

from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.state.process import PartialState

if TYPE_CHECKING:
    from tqdm.auto import tqdm as Bar


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> "Bar[Any]":
    """Return a tqdm bar that shows on the first process of each machine only.

    Args:
        *args: What `tqdm.auto.tqdm` takes.
        main_process_only: Whether the other processes' bars stay hidden.
        **kwargs: What `tqdm.auto.tqdm` takes.

    Example:
        >>> sum(tqdm([1, 2, 3], disable=True))
        6
    """
    from tqdm.auto import tqdm as make_bar

    if args and isinstance(args[0], bool):
        raise ConfigurationError(
            f"The first argument of tqdm is what to iterate over, got {args[0]}. "
            f"Give it by name: main_process_only={args[0]}."
        )
    if main_process_only and not PartialState().is_local_main_process:
        kwargs["disable"] = True
    return make_bar(*args, **kwargs)
