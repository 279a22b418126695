"""Tests of runs on disk: histories, reports, lists."""
