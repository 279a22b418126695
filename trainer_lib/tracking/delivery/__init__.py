"""How values reach a tracker: queues, processes, retries, the spool and its replay."""
