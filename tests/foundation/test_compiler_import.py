"""Training imports torch's compiler, and sympy, only where something is compiled; numbers stay those of torch."""

import subprocess
import sys
from pathlib import Path

from tests.launched import run_launched

_OPTIMIZERS = """
import inspect, sys
import torch
from torch import nn
from torch.optim import Optimizer
from trainer_lib import Accelerator

KINDS = [kind for kind in vars(torch.optim).values() if isinstance(kind, type) and issubclass(kind, Optimizer)]
KINDS = [kind for kind in KINDS if kind not in (Optimizer, torch.optim.SparseAdam)]

def train(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 2, bias=False))
    optimizer = kind(model[0].parameters(), lr=0.1)
    if kind is not torch.optim.LBFGS:
        optimizer.add_param_group({"params": model[1].parameters()})
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(3, 4)).square().mean()
        loss.backward()
        return loss

    for step in range(4):
        closure()
        optimizer.step(closure if kind is torch.optim.LBFGS else None)
        schedule.step()
        optimizer.load_state_dict(optimizer.state_dict())
    return [weight.detach().clone() for weight in model.parameters()]

def with_gradients():
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    try:
        torch.optim.SGD([weight], lr=0.1, differentiable=True).step()
    except RuntimeError as error:
        return str(error)

without = [train(kind) for kind in KINDS], with_gradients()
assert len(KINDS) > 12 and "leaf" in without[1]
assert not {"torch._dynamo", "sympy"} & set(sys.modules)

import torch._dynamo

assert ([train(kind) for kind in KINDS], with_gradients())[1] == without[1]
for kind, weights in zip(KINDS, without[0]):
    assert all(map(torch.equal, train(kind), weights)), kind
for name in ("add_param_group", "load_state_dict", "state_dict", "zero_grad"):
    assert inspect.unwrap(getattr(Optimizer, name)).__dynamo_disable._torchdynamo_disable, name
breaks = []
torch._dynamo.graph_break = lambda: breaks.append(1)
train(torch.optim.AdamW)
assert len(breaks) == 8, breaks  # torch's own steps run
"""

_RUN = """
import sys
import torch
from torch import nn
from trainer_lib import Trainer, TrainingArguments

optimizer_of = lambda model: torch.optim.AdamW(model.parameters(), lr=0.01)
data = torch.randn(32, 4), torch.randint(2, (32,))
for epochs, resume in ((1, "never"), (2, "extend")):
    model = nn.Linear(4, 2)
    args = TrainingArguments(num_train_epochs=epochs, output_dir="runs", resume=resume)
    trainer = Trainer(
        model, args, train_dataset=data, eval_dataset=data, loss_fn=nn.CrossEntropyLoss(), optimizer=optimizer_of(model)
    )
    result = trainer.fit()
    trainer.predict(data)
assert result.state.step == 8, result
assert not {"torch._dynamo", "sympy"} & set(sys.modules)
"""

_RANK = """
import sys
import torch
from torch import nn
from trainer_lib import Accelerator
from trainer_lib.foundation.compiler_import import compiler_defaults

accelerator = Accelerator()
model = nn.Linear(4, 2)
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer = accelerator.prepare(model, optimizer)
batch = torch.ones(3, 4)
for _ in range(2):
    accelerator.backward(model(batch).square().mean())
    optimizer.step()
    optimizer.zero_grad()
accelerator.save_state(sys.argv[1])
assert not {"torch._dynamo", "sympy"} & set(sys.modules)
assert "_dynamo" not in vars(torch)
with compiler_defaults():
    vars(torch)["_dynamo"] = "imported by another thread"
assert vars(torch).pop("_dynamo") == "imported by another thread"
first, second = compiler_defaults(), compiler_defaults()  # of two threads
first.__enter__(), second.__enter__(), first.__exit__(None, None, None), second.__exit__(None, None, None)
assert "_dynamo" not in vars(torch)
assert torch.equal(torch.compile(model, backend="eager")(batch), model(batch))
accelerator.backward(torch.compile(model, backend="aot_eager")(batch).square().mean())
assert all(torch.equal(row, accelerator.reduce(row, "mean")) for row in model.module.weight.grad)
accelerator.end_training()
"""


def test_optimizers_do_without_the_compiler_until_it_is_imported(tmp_path: Path) -> None:
    _run(_OPTIMIZERS, tmp_path)


def test_a_run_with_evaluation_checkpoints_and_a_resume_imports_no_compiler(tmp_path: Path) -> None:
    _run(_RUN, tmp_path)


def test_ranks_of_ddp_import_no_compiler_until_they_compile(tmp_path: Path) -> None:
    done = run_launched(_RANK, tmp_path, str(tmp_path / "state"))
    assert done.returncode == 0, done.stderr


def _run(script: str, folder: Path) -> None:
    done = subprocess.run([sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
