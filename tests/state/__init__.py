"""Tests of what a process knows of itself."""
