"""The command line of sparsekv."""

__version__ = "0.1.0"
