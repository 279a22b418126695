"""This package is what a user may set: dataclasses under the names that Accelerate's users know, one topic a file."""
