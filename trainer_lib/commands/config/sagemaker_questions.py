"""Questions about Amazon SageMaker, and the configuration that their answers make."""

from typing import Any

from trainer_lib.commands.config.questionnaire import Answers, Question
from trainer_lib.commands.config.setting_question import question
from trainer_lib.launchers.settings.config_file import SageMakerConfig
from trainer_lib.launchers.settings.setting import COUNT, FILLED, TEXT, YES_OR_NO, choice
from trainer_lib.options.accelerate_constants import SAGEMAKER_PARALLEL_EC2_INSTANCES
from trainer_lib.options.enums import ComputeEnvironment, SageMakerDistributedType

_ONE, _PARALLEL = SageMakerDistributedType.NO.value, SageMakerDistributedType.DATA_PARALLEL.value
_WORLD = "sagemaker_distributed_type"  # not the key of a file, since SageMaker's kinds have other names


def sagemaker_questions() -> list[Question]:
    """Return the questions."""

    def is_parallel(answers: Answers) -> bool:
        return answers[_WORLD] == _PARALLEL

    def check_instance(name: str, answers: Answers) -> None:
        if is_parallel(answers):
            _PARALLEL_INSTANCES.check("  The answer", name)

    return [
        question("profile", "Which AWS profile (an empty line: keys in the environment)?", "",
                 "A profile of ~/.aws; without one, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.", TEXT),
        question("region", "Which AWS region?", "us-east-1", "Where the jobs run.", FILLED),
        question("iam_role_name", "Which IAM role executes the jobs?", None,
                 "A role that may run SageMaker jobs and read the data.", FILLED),
        question("image_uri", "Which Docker image?", "",
                 "An image with Python, torch and trainer_lib; an empty line: Accelerate's launcher chooses.", TEXT),
        question("sagemaker_inputs_file", "A TSV file of input channels?", "",
                 "Columns channel_name and data_location; an empty line: none.", TEXT),
        question("sagemaker_metrics_file", "A TSV file of metrics?", "",
                 "Columns metric_name and metric_regex; an empty line: none.", TEXT),
        question(_WORLD, "Train on one device, or on all?", _ONE, "DATA_PARALLEL uses all devices of the instances.",
                 choice(_ONE, _PARALLEL)),
        question("ec2_instance_type", "Which type of instance?",
                 lambda answers: SAGEMAKER_PARALLEL_EC2_INSTANCES[0] if is_parallel(answers) else "ml.p3.2xlarge",
                 "An EC2 instance of SageMaker's.", FILLED, check=check_instance),
        question("num_machines", "How many instances?", 1, "SageMaker starts them.", COUNT, when=is_parallel),
        question("debug", "Check the shapes of collectives?", False,
                 "An error instead of a hang where ranks differ; slower.", YES_OR_NO, when=is_parallel),
        question("mixed_precision", "Which precision, if the script does not say it?", "no",
                 "bf16 needs no loss scaling; no is fp32."),
    ]  # fmt: skip


def sagemaker_configuration(answers: Answers, dynamo_config: dict[str, Any]) -> SageMakerConfig:
    """Return the configuration that the answers make."""
    names = set(SageMakerConfig.__dataclass_fields__) & set(answers) - {"compute_environment"}
    filled = {name: answers[name] for name in names if answers[name] != ""}
    values: dict[str, Any] = {"use_cpu": False, "debug": False, **filled}
    return SageMakerConfig(
        compute_environment=ComputeEnvironment.AMAZON_SAGEMAKER,
        distributed_type=SageMakerDistributedType(answers[_WORLD]),
        dynamo_config=dynamo_config,
        **values,
    )


def sagemaker_answers(config: SageMakerConfig) -> dict[str, Any]:
    """Return the answers that lead to a configuration."""
    values = config.to_dict()
    return {**values, **values.get("dynamo_config", {}), _WORLD: values["distributed_type"]}


_PARALLEL_INSTANCES = choice(*SAGEMAKER_PARALLEL_EC2_INSTANCES)
