"""What interpreters that tests start run first: garbage collections during imports find nothing, and take a tenth."""

import gc

gc.set_threshold(100_000, 50, 100)
