"""The library's version, in one place for the package, saved files and reports."""

__version__ = "0.2.0"
