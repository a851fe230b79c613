"""The rules of differentiation, and the residuals."""
