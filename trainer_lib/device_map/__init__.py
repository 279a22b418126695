"""Device maps: which device holds which module of a model that is large for one device."""

MAPS = ("auto", "balanced", "balanced_low_0", "sequential")  # names of maps that are inferred
