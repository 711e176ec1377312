"""REST under /v1 (DESIGN, section 7)."""
