"""Files: atomic writes, checksums, paths behind URLs, strict JSON."""
