"""Correct subclasses, one a file."""
