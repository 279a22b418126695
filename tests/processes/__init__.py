"""Tests of what looks into modules."""
