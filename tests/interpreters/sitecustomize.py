"""What interpreters of tests run first: collecting garbage in what they import would take a fifth of their time.

While they import, collections find nothing. When they exit, Python collects several times what torch and others have
made, which takes 0.3 to 0.6 seconds. Without that, objects in cycles that are left by then are not finalized.
"""

import atexit
import gc

gc.set_threshold(400_000, 50, 100)
atexit.register(gc.freeze)  # the first to be registered is the last to run
