"""The dialect of Triton, of which Pallas needs no operation in Python."""
