"""Checkpoints of recurrent states in RAM: which are kept (scheduler), where they lie (workers).

A hybrid model's prefix can be reused only where both its rows and the state behind its last token are known. vLLM keeps
states as blocks of the small GPU pool; here they outlive them. The scheduler owns the slots, one per checkpoint and
alike on every rank; the workers copy between GPU blocks and slots as told.
"""
