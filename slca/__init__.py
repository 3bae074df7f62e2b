"""SLCA-GRPO in pure PyTorch: segment-locked credit assignment for tool-calling language models."""
