"""The command `trainer-lib plan`: memory and messages of a training on many ranks, without them."""
