"""This package is the `Trainer`: a loop on one page, and what it is made from."""
