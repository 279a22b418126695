"""Names that scripts import from `accelerate.commands.config`."""

from trainer_lib.launchers.settings.config_file import load_config_from_file as load_config_from_file
