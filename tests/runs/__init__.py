"""Tests of what is known of runs from their folders: histories, reports, lists."""
