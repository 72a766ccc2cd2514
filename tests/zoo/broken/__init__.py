"""Broken subclasses, one file an intended check group; each class has a single defect."""
