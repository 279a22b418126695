"""The settings of a launch: options, configuration files, variables."""
