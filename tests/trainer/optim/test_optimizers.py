"""Optimizers by name: which class, which implementation, and what is refused."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.trainer.tasks import arguments, network, points, trainer
from trainer_lib import Accelerator, Trainer, TrainingArguments
from trainer_lib.foundation.errors import ConfigurationError, UnsupportedError
from trainer_lib.trainer.optim.optimizer_packages import PATHS
from trainer_lib.trainer.optim.optimizers import build_optimizer, optimizer_names
from trainer_lib.trainer.optim.parameter_groups import ParameterGroup, group_parameters


def _parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return list(nn.Linear(3, 2).parameters())


class TakesAnything(torch.optim.SGD):
    """A custom optimizer that takes any keyword."""

    def __init__(self, params: Any, **options: Any) -> None:
        self.options = options
        super().__init__(params, lr=options["lr"])


class TakesNoRate(torch.optim.Optimizer):
    """A custom optimizer without a learning rate."""

    def __init__(self, params: Any, growth: float = 1.0) -> None:
        super().__init__(params, {"growth": growth})


def make_nothing(params: Any, lr: float, weight_decay: float) -> None:
    """Return no optimizer."""


@pytest.mark.parametrize("name", [name for name in optimizer_names() if name not in PATHS])
def test_all_optimizers_of_torch_have_short_names(name: str) -> None:
    sizes = nn.Linear(3, 2, bias=False).parameters()
    optimizer = build_optimizer(name, sizes, learning_rate=0.25)
    assert type(optimizer).__name__.lower() == name.replace("_", "")
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert optimizer.param_groups[0].get("weight_decay", 0.0) == 0.0
    assert optimizer.param_groups[0].get("foreach", True) is (None if name in ("adam", "adamw") else True)


def test_optimizer_names_lists_the_supported_ones() -> None:
    assert {"adamw", "adam", "sgd", "nadam", "radam", "adagrad", "rmsprop", "adafactor", "muon"} < set(
        optimizer_names()
    )
    assert {"sparse_adam", "asgd", "rprop", "adadelta", "adamax"} < set(optimizer_names())
    assert not {"lbfgs", "optimizer"} & set(optimizer_names())


@pytest.mark.parametrize("name", ["adam", "adamw", "AdamW"])
def test_adam_is_fused(name: str) -> None:
    optimizer = build_optimizer(name, _parameters(), learning_rate=0.1)
    assert (optimizer.defaults["fused"], optimizer.defaults["foreach"]) == (True, None)


@pytest.mark.parametrize(
    ("options", "fused", "foreach"),
    [
        ({"fused": False}, False, None),
        ({"foreach": False}, None, False),
        ({"differentiable": True}, None, None),
        ({"fused": None}, True, None),
    ],
)
def test_options_choose_the_implementation(options: dict[str, Any], fused: Any, foreach: Any) -> None:
    optimizer = build_optimizer("adamw", _parameters(), learning_rate=0.1, **options)
    assert (optimizer.defaults["fused"], optimizer.defaults["foreach"]) == (fused, foreach)


def test_foreach_is_used_where_there_is_no_fused_kernel() -> None:
    complex_parameters = [nn.Parameter(torch.ones(2, dtype=torch.complex64))]
    for parameters, device in ((complex_parameters, "cpu"), (_parameters(), "meta")):
        optimizer = build_optimizer("adamw", parameters, learning_rate=0.1, device=device)
        assert (optimizer.defaults["fused"], optimizer.defaults["foreach"]) == (None, True)


def test_sgd_takes_sparse_gradients() -> None:
    embedding = nn.Embedding(3, 2, sparse=True)
    before = embedding.weight.detach().clone()
    optimizer = build_optimizer("sgd", embedding.parameters(), learning_rate=0.5)
    embedding(torch.tensor([1])).sum().backward()
    optimizer.step()
    assert torch.equal(embedding.weight, before - torch.tensor([[0.0], [0.5], [0.0]]))


def test_steps_equal_those_of_torch() -> None:
    parameters, references = _parameters(), _parameters()
    options: dict[str, Any] = {"betas": (0.8, 0.9), "eps": 1e-6}
    optimizer = build_optimizer("adamw", parameters, learning_rate=0.1, weight_decay=0.2, **options)
    torch_optimizer = torch.optim.AdamW(references, lr=0.1, weight_decay=0.2, foreach=False, **options)
    for _ in range(5):
        for parameter, reference in zip(parameters, references, strict=True):
            parameter.grad, reference.grad = parameter.detach().sin(), reference.detach().sin()
        optimizer.step()
        torch_optimizer.step()
    torch.testing.assert_close(parameters, references, rtol=1e-5, atol=1e-7)


def test_groups_may_have_different_learning_rates() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    groups = group_parameters(model, 0.1, [ParameterGroup("1.*", learning_rate=0.5)])
    optimizer = build_optimizer("adamw", groups, learning_rate=0.25, weight_decay=0.1)
    settings = [(group["name"], group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    assert settings == [
        ("rest", 0.25, 0.1),
        ("rest, no decay", 0.25, 0.0),
        ("1.*", 0.5, 0.1),
        ("1.*, no decay", 0.5, 0.0),
    ]


def test_names_of_groups_survive_a_restart(tmp_path: Any) -> None:
    def prepared(learning_rate: float) -> tuple[Accelerator, Any]:
        accelerator = Accelerator(cpu=True)
        model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
        optimizer = build_optimizer("adamw", group_parameters(model, 0.1), learning_rate=learning_rate)
        model, optimizer = accelerator.prepare(model, optimizer)
        accelerator.backward(model(torch.ones(1, 2)).square().sum())
        optimizer.step()
        return accelerator, optimizer

    accelerator, saved = prepared(0.25)
    accelerator.save_state(str(tmp_path))
    accelerator.free_memory()
    accelerator, loaded = prepared(0.5)
    accelerator.load_state(str(tmp_path))
    assert [group["name"] for group in loaded.param_groups] == ["rest", "rest, no decay"]
    assert [group["lr"] for group in loaded.param_groups] == [0.25, 0.25]
    for expected, actual in zip(saved.state.values(), loaded.state.values(), strict=True):
        assert torch.equal(expected["exp_avg"], actual["exp_avg"])


def test_parameters_may_be_a_generator() -> None:
    def generated() -> Iterator[dict[str, Any]]:
        yield {"params": nn.Linear(3, 2).parameters()}

    optimizer = build_optimizer("sgd", generated(), learning_rate=0.1)
    assert len(optimizer.param_groups[0]["params"]) == 2


def test_dotted_paths_load_custom_optimizers() -> None:
    optimizer = build_optimizer(
        f"{__name__}.TakesAnything", _parameters(), learning_rate=0.1, weight_decay=0.2, new_option=3
    )
    assert isinstance(optimizer, TakesAnything)
    assert optimizer.options == {"lr": 0.1, "weight_decay": 0.2, "new_option": 3}
    fused = build_optimizer("torch.optim.AdamW", _parameters(), learning_rate=0.1)
    assert fused.defaults["fused"] is True


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("adamx", {}, r"Unknown optimizer 'adamx'\. Known: adadelta, .*Did you mean 'adamax'\?"),
        ("adamww", {}, "Did you mean 'adamw'"),
        (3, {}, r"optimizer must be a name .* \(got 3\)"),
        ("torch.optim.AdamX", {}, r"torch\.optim has no class or function 'AdamX'\. Did you mean 'Adam'"),
        (".Adam", {}, r"cannot be imported \(Empty module name"),
        (f"{__name__}.TakesAnything", {"lr": 0.1}, "the option 'lr' is set by learning_rate"),
        ("no_such_package.Adam", {}, "module 'no_such_package' cannot be imported"),
        ("adamw", {"beta": 0.9}, r"has no option 'beta'\. Known: betas, eps, amsgrad, .* Did you mean 'betas'\?"),
        ("adamw", {"lr": 0.1}, "the option 'lr' is set by learning_rate"),
        ("sgd", {"params": []}, "the option 'params' is set by the model"),
        ("adamw", {"betas": (2.0, 0.9)}, r"'adamw' cannot be created: Invalid beta parameter"),
        ("adafactor", {"fused": True}, "has no option 'fused'"),
        ("muon", {"adjust_lr_fn": "fast"}, r"'muon' cannot be created: Adjust learning rate function fast is not"),
        ("galore_adamw", {"rank": 0}, r"rank must be a whole number of at least 1 \(got 0\)"),
        (
            "apollo_adamw",
            {"scale_type": "chanel"},
            r"Unknown scale_type 'chanel'. Known: channel, tensor. Did you mean",
        ),
        ("rprop", {"weight_decay": 0.1}, r"'rprop' has no weight decay, so weight_decay=0\.1"),
        ("adamw", {"learning_rate": -1.0}, r"learning_rate=-1\.0 must be"),
        ("adamw", {"weight_decay": "0.1"}, r"weight_decay='0\.1' must be"),
        (f"{__name__}.TakesNoRate", {}, r"takes no lr, .*It takes: params, growth"),
        (f"{__name__}.make_nothing", {}, r"must return a torch\.optim\.Optimizer \(got NoneType\)"),
    ],
)
def test_invalid_settings_are_refused(name: Any, options: dict[str, Any], message: str) -> None:
    settings: dict[str, Any] = {"learning_rate": 0.1, **options}
    with pytest.raises(ConfigurationError, match=message):
        build_optimizer(name, _parameters(), **settings)


def test_weight_decay_of_a_group_needs_an_optimizer_with_weight_decay() -> None:
    with pytest.raises(ConfigurationError, match=r"weight_decay=0\.3"):
        build_optimizer("sparse_adam", [{"params": _parameters(), "weight_decay": 0.3}], learning_rate=0.1)


@pytest.mark.parametrize("name", ["lbfgs", "torch.optim.LBFGS"])
def test_lbfgs_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(UnsupportedError, match="needs a closure"):
        build_optimizer(name, _parameters(), learning_rate=0.1)


@pytest.mark.parametrize("name", ["lomo_optim.Lomo", "lomo_optim.AdaLomo"])
def test_optimizers_with_hooks_of_their_own_are_refused_with_the_reason(name: str) -> None:
    pytest.importorskip("lomo_optim")
    assert TrainingArguments(optimizer=name).optimizer == name, "the reason comes where the optimizer is built"
    with pytest.raises(UnsupportedError, match=r'Give the name "lomo" or "adalomo".*lomo_backward'):
        build_optimizer(name, _parameters(), learning_rate=0.1)


def test_an_optimizer_without_parameters_is_refused() -> None:
    for parameters in ([], [{"params": []}]):
        with pytest.raises(ConfigurationError, match="got no parameters"):
            build_optimizer("adamw", parameters, learning_rate=0.1)


# -- given to a Trainer ------------------------------------------------------------------------------------------------


class NeedsRate(torch.optim.SGD):
    """A custom optimizer whose learning rate has no default."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)


def _groups_in_training(given: Any, **options: Any) -> list[dict[str, Any]]:
    made = trainer(arguments(max_steps=1, lr_scheduler="constant", **options), optimizer=given)
    made.fit()
    return made.optimizers["default"].param_groups


def test_a_class_gets_the_arguments(caplog: pytest.LogCaptureFixture) -> None:
    options = {"learning_rate": 0.5, "weight_decay": 0.25, "optimizer_kwargs": {"momentum": 0.75}}
    decayed, others = _groups_in_training(torch.optim.SGD, **options)
    assert [decayed[name] for name in ("lr", "weight_decay", "momentum")] == [0.5, 0.25, 0.75]
    assert [others[name] for name in ("lr", "weight_decay", "momentum")] == [0.5, 0.0, 0.75]
    assert _groups_in_training(NeedsRate, learning_rate=0.5)[0]["lr"] == 0.5
    assert "no effect" not in caplog.text
    with pytest.raises(UnsupportedError, match="optimizer=LBFGS is not supported"):
        _groups_in_training(torch.optim.LBFGS)


def _lbfgs(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters, max_iter=2)


def test_a_given_optimizer_that_needs_a_closure_is_refused_unless_a_training_step_gives_it() -> None:
    model = network()
    for given in (_lbfgs, _lbfgs(model.parameters())):
        made = trainer(arguments(max_steps=1), model=model, optimizer=given)
        with pytest.raises(UnsupportedError, match="LBFGS given as optimizer is not supported: it needs a closure"):
            made.fit()

    class Closed(Trainer):
        def training_step(self, model: Any, batch: Any) -> None:
            optimizer = self.optimizers["default"]

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = cross_entropy(model(batch[0]), batch[1])
                self.accelerator.backward(loss)
                return loss

            optimizer.step(closure)

    weight = next(model.parameters())
    before = weight.detach().clone()
    args = arguments(max_steps=1, lr_scheduler="constant")
    Closed(model, args, train_dataset=points(), optimizer=_lbfgs).fit()
    assert not torch.equal(weight, before)


class Both(torch.optim.Optimizer):
    """Several optimizers as one, without learning rates of its own."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers
        members = [parameter for each in optimizers for group in each.param_groups for parameter in group["params"]]
        super().__init__(members, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for optimizer in self.optimizers:
            optimizer.step(closure)


@pytest.mark.parametrize("schedule", ["linear", "constant", "torch.optim.lr_scheduler.StepLR"])
def test_groups_without_a_learning_rate_name_the_way_to_give_several_optimizers(schedule: str) -> None:
    model = network()
    first, *others = model.parameters()
    optimizers = {"a": torch.optim.SGD([first], lr=0.1), "b": torch.optim.Adam(others, lr=0.1)}
    options = {"step_size": 2} if schedule.endswith("StepLR") else {}
    args = arguments(max_steps=1, lr_scheduler=schedule, lr_scheduler_kwargs=options)
    with pytest.raises(ConfigurationError, match=r"Both given as optimizer .* without 'lr', .*\{.a.: …, .b.: …\}"):
        trainer(args, model=model, optimizer=Both(*optimizers.values())).fit()
    assert trainer(args, model=model, optimizer=optimizers).fit().state.step == 1


def test_arguments_that_a_given_optimizer_does_not_have_are_named(caplog: pytest.LogCaptureFixture) -> None:
    groups = _groups_in_training(
        lambda parameters: torch.optim.SGD(parameters, lr=0.125, momentum=0.5),
        optimizer="adam",
        learning_rate=0.5,
        weight_decay=0.25,
        optimizer_kwargs={"momentum": 0.5, "nesterov": True},
        parameter_groups=[ParameterGroup("*bias", learning_rate=0.25)],
    )
    assert [group["lr"] for group in groups] == [0.125]
    assert (
        "optimizer='adam' and learning_rate=0.5 and weight_decay=0.25 and optimizer_kwargs['nesterov'] and "
        "parameter_groups['*bias'] have no effect on the SGD given as optimizer, which has other values. Set them "
        "there, or give its class: optimizer=SGD takes the arguments."
    ) in caplog.text


def test_a_given_optimizer_with_the_values_of_the_arguments_gets_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, betas=(0.5, 0.75))
    args = arguments(
        max_steps=2, learning_rate=0.5, optimizer="torch.optim.AdamW", optimizer_kwargs={"betas": [0.5, 0.75]}
    )
    made = Trainer(model, args, train_dataset=points(), loss_fn=nn.functional.cross_entropy, optimizer=optimizer)
    made.fit()
    assert made.optimizers["default"].param_groups[0]["lr"] == 0  # at the end of the schedule
    made.fit()
    assert "no effect" not in caplog.text
