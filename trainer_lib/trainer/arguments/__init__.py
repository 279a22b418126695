"""`TrainingArguments`: every argument of a run, its checks, its YAML and JSON files, its command line."""
