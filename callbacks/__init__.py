"""The callbacks that ship with the library, one a file, imported as `trainer_lib.callbacks`."""

# A second import under another name would make every class here twice.
if __name__ != "trainer_lib.callbacks":
    raise ImportError("this folder ships as trainer_lib.callbacks: import that name")

__all__: list[str] = []
