"""Options: dataclasses under the names that Accelerate's users know, one topic per file."""
