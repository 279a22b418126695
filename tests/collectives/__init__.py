"""Tests of the collectives."""
