"""What keeps a run from being spoiled or stuck: NaN and Inf, out of memory, hangs, signals, deadlines."""
