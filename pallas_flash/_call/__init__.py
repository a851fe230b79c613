"""The public functions: signatures, docstrings, and what comes back."""
