"""SLCA-GRPO in pure PyTorch: segment-locked credit assignment for tool-calling language models."""
import os

# Before torch first multiplies: its CPU library otherwise keeps 1,024 compiled kernels, one a shape, of megabytes each.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "32")
