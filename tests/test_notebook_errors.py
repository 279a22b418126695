"""Errors in a real notebook: your own line and the message, with the library's frames folded away."""

import re

import nbformat
import pytest
from nbclient import NotebookClient

from trainer_lib import TrainingArguments
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.foundation.notebook_tracebacks import hide_library_frames

CELLS = [
    "from trainer_lib import TrainingArguments\nTrainingArguments(save_every='often')",
    """
import torch
from torch.utils.data import TensorDataset
from trainer_lib import Trainer

class Mine(Trainer):
    def compute_loss(self, model, batch):
        return model(batch[0]).sum() / batch[7]

rows = TensorDataset(torch.randn(8, 4), torch.randn(8, 1))
args = TrainingArguments(max_steps=2, progress_bar=False)
Mine(torch.nn.Linear(4, 1), args, train_dataset=rows).fit()
""",
]


@pytest.mark.slow
@pytest.mark.launch
@pytest.mark.filterwarnings("ignore")  # of the client, whose kernel is another process
def test_notebooks_show_your_lines_and_not_the_frames_of_the_library() -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    NotebookClient(notebook, timeout=60, kernel_name="python3", allow_errors=True).execute()
    shown = [
        re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(output["traceback"]))
        for cell in notebook.cells
        for output in cell.outputs
        if output.output_type == "error"
    ]
    arguments, own_loss = shown
    assert "ConfigurationError: save_every='often' is not a duration" in arguments
    assert len(arguments.splitlines()) < 40
    assert "IndexError" in own_loss
    assert "/ batch[7]" in own_loss
    for text in shown:
        assert "[... skipping hidden" in text
    assert "train_loop.py" not in own_loss


def test_outside_of_notebooks_tracebacks_stay_whole() -> None:
    with pytest.raises(ConfigurationError) as caught:
        TrainingArguments(save_every="often")
    hide_library_frames(caught.value)
    assert not any("__tracebackhide__" in entry.locals for entry in caught.traceback)
