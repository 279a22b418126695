"""This file is the learning rate among what is logged."""

from trainer_lib.events import Callback, Run


class LearningRateMonitor(Callback):
    """Adds the learning rate to what is logged.

    It is called `learning_rate` where all weights have the same one. Where they differ, each optimizer's is called
    `learning_rate/<optimizer>`, and where groups within it differ, `learning_rate/<optimizer>/<group>`: by the group's
    "name", or its place.

    Args:
        momentum: Whether to add the momentum (the first beta of Adam) too, under names of the same form.

    Example:
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
        >>> values = {"loss": 1.0}
        >>> LearningRateMonitor(momentum=True).on_log(Run(optimizers={"default": optimizer}), values)
        >>> values
        {'loss': 1.0, 'learning_rate': 0.1, 'momentum': 0.9}
    """

    order = -100  # before those who show what is logged

    def __init__(self, momentum: bool = False) -> None:
        self._momentum = momentum
        self._differing: set[str] = set()

    def on_log(self, run: Run, values: dict[str, float]) -> None:
        self._add("learning_rate", _settings(run, "lr"), values)
        if self._momentum:
            self._add("momentum", _settings(run, "momentum"), values)

    def _add(self, name: str, settings: dict[str, dict[str, float]], values: dict[str, float]) -> None:
        # What differed once keeps its own name: schedules meet now and then, at 0 for one.
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
    """Return a setting of each group of each optimizer that has it."""
    return {
        optimizer: {
            str(group.get("name", place)): float(group["betas"][0] if name not in group else group[name])
            for place, group in enumerate(prepared.param_groups)
            if name in group or (name == "momentum" and "betas" in group)
        }
        for optimizer, prepared in run.optimizers.items()
    }
