"""Whether an object is of a class of transformers, told without importing it."""


def is_transformers_kind(kind: type, name: str) -> bool:
    """Whether a class is, or derives from, a transformers class of this name. It does not import transformers."""
    return any(cls.__name__ == name and cls.__module__.startswith("transformers.") for cls in kind.__mro__)
