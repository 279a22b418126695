"""The trackers, one file a vendor."""
