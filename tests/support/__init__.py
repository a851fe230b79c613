"""Modules that tests share: no test module imports another."""
