"""Names that scripts import from `accelerate.commands.config`."""
