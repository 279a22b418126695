"""The part of torch_xla that torch.distributed finds ranks by."""
