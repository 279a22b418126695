"""The methods of a `Trainer` that hand out the model: `save_model`, the model card, the Hub and exports."""

from collections.abc import Sequence
from typing import Any

from trainer_lib.filesystem.remote_paths import AnyPath, path_at
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.trainer.checks.foreign_calls import explains_form
from trainer_lib.trainer.publish.save_pretrained import save_model
from trainer_lib.trainer.trainer_interface import TrainerInterface


class PublishMethods:
    """What a `Trainer` does with a trained model."""

    def save_model(self: TrainerInterface, output_dir: str | AnyPath | None = None) -> None:
        """Save the model and its processor in the format of `from_pretrained`. All ranks must call it.

        Args:
            output_dir: The folder; by default `model` in the run's folder, after `fit` with an `output_dir`.
        """
        from trainer_lib.trainer.defaults import prepare_models
        from trainer_lib.trainer.optim.optimizer_modes import weights_in_use

        run_folder = self.parts.run_folder
        if output_dir is None and run_folder is None:
            raise ConfigurationError(
                "save_model() needs a folder: without one it saves into the run's folder, and there is no run yet. "
                'Give one: save_model("model"); or call it after fit() with output_dir.'
            )
        prepare_models(self)
        target = run_folder / "model" if output_dir is None and run_folder else path_at(output_dir or "")
        with weights_in_use(self.run, self.events):
            save_model(self, target)

    def model_card(
        self: TrainerInterface,
        *,
        name: str | None = None,
        license: str | None = None,
        language: str | Sequence[str] | None = None,
        base_model: str | None = None,
        datasets: str | Sequence[str] | None = None,
        task: str | None = None,
        tags: Sequence[str] = (),
    ) -> str:
        """Return the model card, a README for the Hub: description, metrics, arguments and versions.

        Args:
            name: The name of the model.
            license: The Hub's identifier of the license: "mit", "apache-2.0".
            language: The language of the data, or several: "en".
            base_model: The model on the Hub that was fine-tuned; by default from the model's config.
            datasets: The datasets on the Hub that the model was trained on; by default from the training data.
            task: The Hub's identifier of the task: "image-classification"; by default from a transformers model.
            tags: More tags.

        Example:
            >>> from torch import nn
            >>> from trainer_lib import Trainer, TrainingArguments
            >>> args = TrainingArguments(max_steps=1, use_cpu=True)
            >>> Trainer(nn.Linear(4, 2), args).model_card(license="mit").splitlines()[:3]
            ['---', 'library_name: trainer_lib', 'license: mit']
        """
        from trainer_lib.trainer.publish.model_card import model_card

        return model_card(
            self,
            name=name,
            license=license,
            language=language,
            base_model=base_model,
            datasets=datasets,
            task=task,
            tags=tags,
        )

    @explains_form
    def push_to_hub(
        self: TrainerInterface,
        repo_id: str,
        *,
        commit_message: str = "Upload model",
        private: bool | None = None,
        revision: str | None = None,
        create_pr: bool = False,
        exist_ok: bool = True,
        token: str | None = None,
        card: str | None = None,
        **about: Any,
    ) -> str:
        """Upload the model and its card to the Hugging Face Hub in one commit. All ranks must call it.

        Args:
            repo_id: The repository, "owner/name"; it is created if it does not exist.
            commit_message: The message of the commit.
            private: Whether a new repository is private; by default as the owner's settings say.
            revision: The branch; by default "main".
            create_pr: Open a pull request instead of committing.
            exist_ok: Whether the repository may exist already.
            token: An access token; by default that of `hf auth login` or `HF_TOKEN`.
            card: The text of the README; by default that of `model_card`.
            **about: Arguments of `model_card`: `license="mit"`.

        Returns:
            The URL of the commit or of the pull request.

        Raises:
            HubError: If the Hub cannot be reached after several attempts, or refuses the upload; on all ranks.
        """
        from trainer_lib.trainer.publish.hub import Commit, push_to_hub

        commit = Commit(commit_message, private, revision, create_pr, exist_ok)
        return push_to_hub(self, repo_id, commit, token, card, about)

    def export(
        self: TrainerInterface,
        path: str | AnyPath,
        format: str | None = None,
        *,
        example: Any = None,
        dynamic: Sequence[int] = (0,),
    ) -> None:
        """Export the model to a file that runs without its Python code. All ranks must call it.

        The exported model is in evaluation mode, in full precision, on the CPU, with averaged weights if the run has
        any. The trainer's model does not change.

        Args:
            path: The file: `.pt2`, which `torch.export.load` reads, or `.onnx`.
            format: "torch" or "onnx"; by default from the ending of the path.
            example: An example of the model's inputs: a tensor, a tuple, or a dict by names; by default the inputs of
                the first samples of `eval_dataset`, else of `train_dataset`.
            dynamic: The dimensions whose sizes may differ from the example's: (0,) is the batch, (0, 1) also the length
                of texts.

        Raises:
            UnsupportedError: If the model cannot be exported.
            PreparationError: If the model is sharded.
        """
        from trainer_lib.trainer.publish.export import export

        export(self, path_at(path), format, example, dynamic)
