"""The trainer, `python -m models.train`."""
