"""The tables of docs/command_line.md, which follow from the settings of a launch.

`python -m tests.commands.write_page` writes them.
"""

import re
from pathlib import Path

from trainer_lib.launchers.settings.launch_options import GROUPS, SETTINGS
from trainer_lib.launchers.settings.setting import Setting

PAGE = Path(__file__).parents[2] / "docs" / "command_line.md"
_PLACE = r"(<!-- Written by python -m tests.commands.write_page -->\n).*?(?=\n## )"


def with_tables(text: str) -> str:
    """Return the text of the page with its tables as they follow from the settings."""
    tables = "\n".join([*(_table(topic, title) for topic, title in GROUPS.items()), _refused()])
    replaced, count = re.subn(_PLACE, lambda match: f"{match[1]}\n{tables}", text, flags=re.DOTALL)
    assert count == 1
    return replaced


def _table(topic: str, title: str) -> str:
    settings = [setting for setting in SETTINGS.values() if setting.group == topic and setting.missing is None]
    name, _, condition = title.partition(", if ")
    lines = [
        f"#### {name[0].upper()}{name[1:]} (`--help {topic}`)",
        "",
        *(["These options count where the script leaves the choice to the launcher.", ""] if condition else []),
        "| option, key in a file, variable | default | |",
        "|---|---|---|",
    ]
    return "\n".join([*lines, *(_row(setting) for setting in settings), ""])


def _row(setting: Setting) -> str:
    option = f"`--{setting.name}`" + (f", `-{setting.short}`" if setting.short else "")
    section = "" if setting.section == "deepspeed_config" else setting.section  # a file with it in use is refused
    key = f"{section}.{setting.file_key}" if section else setting.file_key if not setting.section else None
    default = setting.default not in (None, False, "")
    names = "<br>".join(filter(None, [option, _code(key), _code(setting.variable)]))
    cells = [names, _code(setting.default if default else ""), setting.help]
    return f"| {' | '.join(cells)} |"


def _refused() -> str:
    """Return a table of the features that this version does not have, with their options and what to do instead."""
    lines = ["#### Refused: features that this version does not have", "", "| feature | options | instead |"]
    lines.append("|---|---|---|")
    for feature in dict.fromkeys(setting.missing for setting in SETTINGS.values() if setting.missing):
        names = [f"`--{setting.name}`" for setting in SETTINGS.values() if setting.missing == feature]
        lines.append(f"| {feature.name} | {', '.join(names)} | {feature.instead} |")
    return "\n".join([*lines, ""])


def _code(text: object) -> str:
    return f"`{text}`" if text else ""


def main() -> None:
    """Write the tables."""
    PAGE.write_text(with_tables(PAGE.read_text()))


if __name__ == "__main__":
    main()
