"""The Accelerator of a fit: built from arguments, configs of DeepSpeed and options of Megatron-LM."""
