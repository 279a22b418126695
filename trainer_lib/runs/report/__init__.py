"""The HTML report of runs, its data and its charts."""
