"""Which ranks save a state: all of them, or rank 0 alone where only the main process calls `save_state`.

Scripts for Accelerate often save under `if accelerator.is_main_process:`. Under DDP rank 0 has all weights, so it saves
alone once it has waited for the other ranks. They may be in a collective of the script, so ranks find each other by the
store of the world. Rank 0 counts its calls; another rank joins the call at its own place in the training.
"""

from datetime import timedelta
from functools import partial

from trainer_lib.accelerator.checkpoints.checkpoints import Checkpoints
from trainer_lib.collectives import agreement
from trainer_lib.foundation.errors import WorldError
from trainer_lib.logging import get_logger
from trainer_lib.process_group import LoneProcess, ProcessGroup, looks

_logger = get_logger(__name__)

_SAVE, _LOAD = "save_state", "load_state"
_ALL, _ALONE = "all", "alone"
_SHOWN = 8  # ranks in a message


def ranks_that_save(checkpoints: Checkpoints) -> ProcessGroup | None:
    """Return the group of the ranks that save; `None` on a rank that called `save_state` after rank 0 saved alone."""
    group = checkpoints.engine.group
    if _answer(checkpoints, _SAVE) == _ALL:
        return group
    if group.rank == 0:
        return LoneProcess()
    _logger.warning(
        "Rank %d called save_state after rank 0 had saved alone, so the checkpoint has none of its random states.",
        group.rank,
        main_process_only=False,
    )
    return None


def meet_to_load(checkpoints: Checkpoints) -> None:
    """Let a rank that is in `save_state` by mistake find the others in `load_state`, and raise there."""
    _answer(checkpoints, _LOAD)


def _answer(checkpoints: Checkpoints, doing: str) -> str:
    """Return which ranks are in this call; where the store of the world fails, collectives find out."""
    group = checkpoints.engine.group
    if group.size == 1:  # nobody to wait for: its store, which may be a file on a full disk, stays as it is
        return _ALL
    try:
        calls = _Calls(checkpoints, doing)
        if group.rank:
            return calls.join()
        return calls.wait_for_others() if doing == _SAVE else calls.begin(_ALL)
    except WorldError:
        raise
    except RuntimeError:  # a store on a full disk, or whose process has ended
        return _ALL


def _may_save_alone(checkpoints: Checkpoints) -> bool:
    engine = checkpoints.engine
    is_whole = not (engine.strategy.gathers_to_rank_zero or engine.trains_locally)
    return is_whole and not checkpoints.project.save_on_each_node


class _Calls:
    """The calls of rank 0, by number, in the store of the world.

    Args:
        checkpoints: What is saved.
        doing: The call, as the user knows it.
    """

    def __init__(self, checkpoints: Checkpoints, doing: str) -> None:
        engine = checkpoints.engine
        self._group, self._place, self._doing = engine.group, engine.window.backwards, doing
        self._store = engine.group.store(_SAVE)
        self._timeout = (engine.group.timeout or timedelta.max).total_seconds()
        self._may_save_alone = _may_save_alone(checkpoints)
        # Meanwhile the other ranks may be in a collective, which ends with an error after the timeout.
        self._patience = min(agreement.PATIENCE, self._timeout / 2) if self._may_save_alone else self._timeout

    def begin(self, answer: str) -> str:
        """Begin a call of rank 0 with its answer, and return that."""
        self._store.set(f"{self._store.add('calls', 0) + 1}/answer", answer)
        self._begin()
        return answer

    def wait_for_others(self) -> str:
        """Begin a call of rank 0, and return its answer: all ranks, if the others joined it in time.

        Rank 0 does not wait where no other rank has called `save_state` since it saved alone.

        Raises:
            WorldError: If rank 0 cannot save alone.
        """
        number = self._begin()
        is_hopeless = self._store.check(["alone_after"]) and self._get("alone_after") == self._calls_of_others()
        joined = [f"{number}/{rank}" for rank in range(1, self._group.size)]
        notice = self._patience / 6 if self._may_save_alone else agreement.PATIENCE
        with self._group.noticed_after(notice, lambda: self._warn_of_the_wait(notice, self._missing(number))):
            is_joined = any(self._store.check(joined) for _ in looks(0 if is_hopeless else self._patience))
        if not is_joined:
            self._give_up(self._missing(number))
        answer = _ALL if is_joined else _ALONE
        self._store.set(f"{number}/answer", answer)
        return answer

    def _begin(self) -> int:
        number = self._store.add("calls", 0) + 1
        self._store.set(f"{number}/place", str(self._place))
        self._store.add("calls", 1)
        return number

    def _warn_of_the_wait(self, waited: float, missing: str) -> None:
        _logger.warning(
            "Rank 0 has waited %g seconds in save_state for %s. All ranks have to call it: is it inside `if "
            "accelerator.is_main_process`?%s",
            waited,
            missing,
            f" Rank 0 saves alone after {self._patience:g} seconds." if self._may_save_alone else "",
        )

    def _give_up(self, missing: str) -> None:
        if not self._may_save_alone:
            raise WorldError(
                f"Rank 0 has waited {self._timeout:g} seconds in save_state for {missing}. All ranks have to call it."
            )
        self._store.set("alone_after", self._calls_of_others())
        _logger.warning_once(
            "save_state was called on rank 0, and within %g seconds not on %s: rank 0 saves alone. Without the random "
            "states of the others, a resumed run differs from one that was not interrupted. Call save_state on all "
            "ranks, outside `if accelerator.is_main_process`.",
            self._patience,
            missing,
        )

    def _missing(self, number: int) -> str:
        ranks = [rank for rank in range(1, self._group.size) if not self._store.check([f"{number}/{rank}"])]
        more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
        return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:_SHOWN]))}{more}"

    def join(self) -> str:
        """Join the call of rank 0 at this place in the training, and return its answer."""
        store, rank = self._store, self._group.rank
        store.add("others", 1)
        last = f"last/{rank}"
        answered = int(self._get(last)) if store.check([last]) else 0
        joined = 0
        with self._group.noticed_after(agreement.PATIENCE, partial(agreement.warn_of_waiting, rank, self._doing)):
            for _ in looks(self._timeout):
                number = store.add("calls", 0)
                if number == answered:
                    continue
                if store.check([f"{number}/answer"]):
                    answered = number
                    store.set(last, str(number))
                    answer = self._get(f"{number}/answer")
                    # Of a call that rank 0 made alone at an earlier place, this rank is not late: it awaits the next.
                    if answer == _ALL or joined == number or int(self._get(f"{number}/place")) >= self._place:
                        return answer
                elif joined != number:
                    store.set(f"{number}/{rank}", "")
                    joined = number
        raise WorldError(
            f"Rank {rank} has waited {self._timeout:g} seconds in {self._doing} for rank 0. All ranks have to call it."
        )

    def _calls_of_others(self) -> str:
        return str(self._store.add("others", 0))

    def _get(self, key: str) -> str:
        return self._store.get(key).decode()
