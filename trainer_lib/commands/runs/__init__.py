"""The commands on folders of runs: `trainer-lib runs`, `report` and `track`."""
