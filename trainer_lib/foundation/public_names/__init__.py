"""What the library offers by name, and names of other libraries: stubs, signatures, and what to use instead."""
