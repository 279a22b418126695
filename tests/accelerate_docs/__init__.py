"""What pages about Accelerate show, as scripts with their imports changed: each block's calls, and what they do."""
