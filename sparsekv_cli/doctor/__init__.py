"""Is this machine fit to serve, and if not, why and what to do: one check per file, rendered by `sparsekv doctor`."""
