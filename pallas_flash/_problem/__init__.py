"""The problem that a call states: masks, scores, dropout, operands and features."""
