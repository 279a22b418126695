"""The command line: a file or a folder for each command, which `main` finds by name."""
