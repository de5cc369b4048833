"""A run's folder, and the reports made from it."""
