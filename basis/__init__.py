"""The key sketch basis: file format, capture, fit, recall."""
