"""`MegatronLMPlugin`: options of Megatron-LM, and what this library does for each."""
