"""The report of runs: one page of HTML, its data and its charts."""
