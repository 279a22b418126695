"""The shipped trackers, one file per vendor."""
