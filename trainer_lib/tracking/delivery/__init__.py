"""Delivery of values to trackers: queues, processes, retries, the spool and its replay."""
