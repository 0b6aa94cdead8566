"""Bridges to other libraries: each module opens its own library and is imported by its name."""
