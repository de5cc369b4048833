"""Ops of the sparse decode step; README.md gives the contract. Kept free of work: see profiles/launch on PYTHONSAFEPATH."""
