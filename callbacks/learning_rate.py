"""The learning rate in the log."""

from collections.abc import Mapping
from typing import Any

from trainer_lib.events import Callback, Run


class LearningRateMonitor(Callback):
    """Adds the learning rate to the log.

    If all weights have the same rate, its name is `learning_rate`. If optimizers differ, the names are
    `learning_rate/<optimizer>`; if the groups of an optimizer differ, `learning_rate/<optimizer>/<group>`, where
    `<group>` is the group's "name" or its index.

    Args:
        momentum: Whether to add the momentum (the first beta of Adam) too, under names such as `momentum`.

    Example:
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
        >>> values = {"loss": 1.0}
        >>> LearningRateMonitor(momentum=True).on_log(Run(optimizers={"default": optimizer}), values)
        >>> values
        {'loss': 1.0, 'learning_rate': 0.1, 'momentum': 0.9}
    """

    order = -100  # before the callbacks that show the log

    def __init__(self, momentum: bool = False) -> None:
        self._momentum = momentum
        self._differing: set[str] = set()

    def on_log(self, run: Run, values: dict[str, float]) -> None:
        self._add("learning_rate", _settings(run, "lr"), values)
        if self._momentum:
            self._add("momentum", _settings(run, "momentum"), values)

    def state_dict(self) -> dict[str, list[str]]:
        return {"differing": sorted(self._differing)} if self._differing else {}

    def load_state_dict(self, state: Mapping[str, list[str]]) -> None:
        self._differing.update(state["differing"])

    def _add(self, name: str, settings: dict[str, dict[str, float]], values: dict[str, float]) -> None:
        # Once rates differed, the names stay separate: schedules may meet later, for example at 0.
        everywhere = {value for groups in settings.values() for value in groups.values()}
        if not self._has_differed(name, everywhere):
            if everywhere:
                values[name] = everywhere.pop()
            return
        for optimizer, groups in settings.items():
            of_optimizer = f"{name}/{optimizer}"
            if self._has_differed(of_optimizer, set(groups.values())):
                values.update({f"{of_optimizer}/{group}": value for group, value in groups.items()})
            elif groups:
                values[of_optimizer] = next(iter(groups.values()))

    def _has_differed(self, name: str, values: set[float]) -> bool:
        if len(values) > 1:
            self._differing.add(name)
        return name in self._differing


def _settings(run: Run, name: str) -> dict[str, dict[str, float]]:
    """Return a setting of each parameter group that has it, by optimizer and group."""
    return {
        optimizer: {
            str(group.get("name", index)): float(value)
            for index, group in enumerate(prepared.param_groups)
            if (value := _setting(group, name)) is not None
        }
        for optimizer, prepared in run.optimizers.items()
    }


def _setting(group: Mapping[str, Any], name: str) -> Any:
    """Return a setting of a parameter group; the momentum of Adam is its first beta."""
    if name == "momentum" and name not in group and "betas" in group:
        return group["betas"][0]
    return group.get(name)
