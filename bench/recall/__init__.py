"""Recall: attention mass offline (`mass.py`), answers of a served model (`sparsekv validate recall`)."""
