"""Tests of events, and of those who listen to them."""
