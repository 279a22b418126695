"""Declared arguments: what is read from the declaration on a field, for each of its readers."""

import dataclasses
import inspect
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.trainer.arguments.stub import STUB, stub
from tests.trainer.arguments.write_pages import DOCS, argument_tables, with_tables
from tests.trainer.tasks import network, points
from tests.worlds import run_world
from trainer_lib import ConfigurationError, DistributedOperationException, Trainer, TrainingArguments
from trainer_lib.trainer.arguments import value_checks
from trainer_lib.trainer.arguments.declaration import OnResume, check_for, documented, setting, settings
from trainer_lib.trainer.arguments.rules import RULES


@dataclasses.dataclass
class Teacher:
    """An object that an argument holds."""

    folder: str
    layers: int = 2


@documented
@dataclasses.dataclass(kw_only=True)
class Distillation(TrainingArguments):
    """Arguments of a script that distils a model.

    Example:
        >>> Distillation().temperature
        2.0
    """

    temperature: float = setting(
        "distillation", 2.0, "Divides the `logits`.", check=value_checks.number(above=0), on_resume=OnResume.REFUSED
    )
    loss: Literal["kl", "mse"] | None = setting("distillation", None, "The loss between student and teacher.")
    frozen: bool = setting("distillation", True, "Keep the teacher as it is.", on_resume=OnResume.KEPT)
    layers: Sequence[str] = setting("distillation", ["last"], "The layers to compare.")
    cache: str | None = setting("speed", None, "Where outputs are kept.", on_resume=OnResume.SILENT, may_differ=True)
    teacher: Teacher | None = setting("distillation", None, "The teacher.")
    teachers: Sequence[Teacher] = setting("distillation", [], "Further teachers.")
    sizes: list[int] = setting("distillation", [1], "The sizes, which are not checked.")
    undeclared: int = 3
    learning_rate: float = 1e-3  # another default for a declared argument


def make(**values: Any) -> Distillation:
    return Distillation(**values)


# -- checks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": 0}, "temperature must be a finite number above 0, got 0."),
        ({"loss": "cosine"}, "Unknown loss 'cosine'. Known: kl, mse."),
        ({"frozen": None}, "frozen must be True or False, got None."),
        ({"layers": "last"}, "layers must be a list of texts, got 'last'. Give layers=['last']."),
        ({"cache": 3}, "cache must be a text that is not blank, got 3."),
        ({"teacher": "runs"}, "teacher must be a Teacher, got 'runs'."),
        ({"teachers": Teacher("runs")}, "teachers must be a list of Teacher, got Teacher("),
        ({"learning_rate": -1}, "learning_rate must be a finite number of at least 0, got -1."),
        ({"learning_rate": 0.1, "load_best_at_end": True}, "load_best_at_end=True loads a checkpoint of output_dir"),
    ],
)
def test_a_subclass_declares_arguments_that_are_checked(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        make(**values)
    assert message in str(caught.value)


def test_none_is_allowed_if_the_type_has_it() -> None:
    args = make(loss=None, cache=None, temperature=1, layers=("a", "b"))
    assert (args.loss, args.cache, args.temperature, args.layers) == (None, None, 1, ["a", "b"])
    with pytest.raises(ConfigurationError, match="temperature must be"):
        make(temperature=None)


def test_a_field_without_a_declaration_takes_any_value() -> None:
    assert make(undeclared="x").undeclared == "x"
    assert set(settings(Distillation)) == {field.name for field in dataclasses.fields(Distillation)} - {"undeclared"}


def test_another_default_keeps_the_declaration() -> None:
    assert Distillation().learning_rate == 1e-3
    assert settings(Distillation)["learning_rate"].text == settings(TrainingArguments)["learning_rate"].text


def test_lists_and_dicts_are_copied_for_each_object() -> None:
    assert Distillation().sizes == Distillation().sizes == [1]
    assert Distillation().sizes is not Distillation().sizes


@pytest.mark.parametrize(
    ("hint", "allowed", "refused"),
    [
        (bool | None, True, 1),
        (str, "a", 1),
        (Literal["a", "b"], "b", "c"),
        (Teacher | None, Teacher("x"), "x"),
        (list[Teacher], [Teacher("x")], ["x"]),
        (Sequence[str] | None, ["x"], [1]),
        (dict[str, Any], {"x": 1}, [1]),
    ],
)
def test_simple_types_imply_their_check(hint: Any, allowed: Any, refused: Any) -> None:
    check = check_for(hint)
    assert check is not None
    assert check("x", allowed) == allowed
    with pytest.raises(ConfigurationError, match="x"):
        check("x", refused)


@pytest.mark.parametrize("hint", [int, float, int | str, Literal["a"] | int, Sequence[float], Any])
def test_other_types_need_a_check_of_their_own(hint: Any) -> None:
    assert check_for(hint) is None


def test_types_may_be_written_as_texts() -> None:
    @dataclasses.dataclass(kw_only=True)
    class Quoted(TrainingArguments):
        frozen: "bool | None" = setting("x", None, "Whether it is frozen.")

    make_quoted: Any = Quoted
    assert (Quoted().frozen, Quoted(frozen=True).frozen) == (None, True)
    with pytest.raises(ConfigurationError, match="frozen must be True or False"):
        make_quoted(frozen="x")


def test_a_type_that_is_not_known_at_run_time_leaves_the_check_that_is_given() -> None:
    class Local:
        pass

    @dataclasses.dataclass(kw_only=True)
    class Unknown(TrainingArguments):
        teacher: "Local | None" = setting("x", None, "The teacher.")
        layers: "Local | None" = setting("x", None, "The layers.", check=value_checks.whole())

    args: Any = Unknown
    assert args(teacher=3, max_steps=2).to_dict()["teacher"] == 3
    assert args.from_dict({"fsdp": {"cpu_offload": True}, "layers": None}).fsdp.cpu_offload
    for name in ("layers", "max_steps"):
        with pytest.raises(ConfigurationError, match=f"{name} must be a whole number of at least 1, got 0"):
            args(**{name: 0})


def test_rules_relate_arguments_that_exist() -> None:
    names = {name for related in RULES.values() for name in related}
    assert names <= set(settings(TrainingArguments))
    assert all(len(related) > 1 for related in RULES.values())


# -- dicts, files, copies --------------------------------------------------------------------------------------------


def test_files_hold_objects_of_any_declared_type(tmp_path: Path) -> None:
    args = make(teacher=Teacher("a", 3), teachers=[Teacher("b")], temperature=3.5)
    assert args.to_dict()["teacher"] == {"folder": "a", "layers": 3}
    for name in ("run.yaml", "run.json"):
        args.to_file(tmp_path / name)
        assert Distillation.from_file(tmp_path / name) == args
    with pytest.raises(ConfigurationError, match=r"Unknown field of teachers\[0\] 'foldr'"):
        Distillation.from_dict({"teachers": [{"foldr": "x"}]})
    assert pickle.loads(pickle.dumps(args)) == dataclasses.replace(args) == args


# -- the command line and help ---------------------------------------------------------------------------------------


def test_help_groups_arguments_by_their_sections(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit):
        Distillation.from_cli(["--help"])
    text = capsys.readouterr().out
    sections = dict.fromkeys(declared.section for declared in settings(Distillation).values())
    places = [text.index(f"\n{section}:\n") for section in [*sections, "other arguments"]]
    assert places == sorted(places)
    assert places[-3] < text.index("\n  --temperature ") < text.index("\n  --teachers") < places[-2]
    assert places[-2] < text.index("\n  --cache ") < places[-1] < text.index("\n  --undeclared ")
    assert "Divides the logits. (default: 2.0)" in " ".join(text.split())


def test_the_command_line_sets_declared_arguments() -> None:
    args = Distillation.from_cli(["--temperature", "3", "--loss", "kl", "--teacher.folder", "a", "--frozen", "false"])
    assert args == make(temperature=3, loss="kl", teacher=Teacher("a"), frozen=False)


def test_docstrings_describe_each_argument() -> None:
    for cls in (TrainingArguments, Distillation):
        text = inspect.getdoc(cls) or ""
        for name, declared in settings(cls).items():
            assert " ".join(f"{name}: {declared.text}".split()) in " ".join(text.split())
        assert text.index("Args:") < text.index("Example:") < text.index(">>> ")
        assert max(map(len, text.splitlines())) <= 116


# -- the documentation -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", ["arguments.md", "trainer.md"])
def test_tables_of_the_documentation_are_current(page: str) -> None:
    text = (DOCS / page).read_text()
    assert text == with_tables(page, text), "Write them by: python -m tests.trainer.arguments.write_pages"


def test_editors_get_the_sentence_of_each_argument() -> None:
    assert STUB.read_text("utf-8") == stub(), "Write it by: python -m tests.trainer.arguments.write_pages"


def test_tables_have_the_arguments_of_a_subclass() -> None:
    tables = argument_tables(Distillation)
    assert "\n### Distillation\n\n| argument | default | |\n|---|---|---|\n| `temperature` | `2.0` | Divides" in tables
    assert (
        "\n### Speed\n\n| argument | default | |\n|---|---|---|\n| `cache` | `None` | Where outputs are kept. |"
        in tables
    )


# -- resuming a run, and several ranks ---------------------------------------------------------------------------------


def small(folder: Path, **options: Any) -> Trainer:
    quiet: dict[str, Any] = {"output_dir": folder, "max_steps": 4, "save_every": 2, "use_cpu": True}
    from torch.nn.functional import cross_entropy

    args = make(**{**quiet, "progress_bar": False, **options})
    return Trainer(network(), args, train_dataset=points(), loss_fn=cross_entropy)


def test_the_policy_for_resume_is_that_of_the_declaration(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    small(tmp_path).fit()
    (checkpoint,) = tmp_path.glob("*/checkpoints/*2")
    small(tmp_path / "other", resume=checkpoint, frozen=False, cache="here", loss="kl").fit()
    (entry,) = [record.getMessage() for record in caplog.records if "changed arguments" in record.getMessage()]
    assert entry.splitlines()[1:] == [
        "  loss: None → 'kl'",
        "  frozen: True → False (the checkpoint's value counts: the order of the data and the generators are restored)",
    ]
    with pytest.raises(ConfigurationError, match=r"resumed with a changed temperature \(temperature: 2\.0 → 3\)"):
        small(tmp_path, resume=checkpoint, temperature=3).fit()


def test_ranks_may_differ_only_in_arguments_that_say_so(tmp_path: Path) -> None:
    def body() -> None:
        from trainer_lib import PartialState

        rank = PartialState(cpu=True).process_index
        small(tmp_path, cache=f"rank {rank}", max_steps=1).fit()
        with pytest.raises(DistributedOperationException, match="loss"):
            small(tmp_path, loss=("kl", "mse")[rank], max_steps=1).fit()

    run_world(body, num_processes=2)


def test_a_trainer_from_a_checkpoint_takes_the_class_of_its_arguments(tmp_path: Path) -> None:
    result = small(tmp_path, temperature=3.0).fit()
    assert result.last_checkpoint is not None
    with pytest.raises(ConfigurationError, match=r"does not declare: cache, .*temperature.*arguments_class="):
        Trainer.from_checkpoint(result.last_checkpoint, network())
    restored = Trainer.from_checkpoint(result.last_checkpoint, network(), arguments_class=Distillation)
    assert isinstance(restored.args, Distillation)
    assert restored.args.temperature == 3.0
