"""Linear layers in 8 or 4 bits, by bitsandbytes."""
