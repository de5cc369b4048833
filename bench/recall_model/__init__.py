"""A small hybrid model that has learned to retrieve: how it was made (`train.py`) and its weights."""
