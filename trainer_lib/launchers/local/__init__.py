"""A launch on one machine, without torch: its processes, and the store where they meet."""
