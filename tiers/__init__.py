"""The storage hierarchy: stores, and moving objects between them verified."""
