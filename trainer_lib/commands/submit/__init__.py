"""The command `trainer-lib submit`: hand a launch to a scheduler."""
