"""Tests of the callbacks that ship with the library."""
