"""The choice of the implementation of each pass: measured rules and tuned tiles."""
