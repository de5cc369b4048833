"""The demo: a small real model on any CPU."""
