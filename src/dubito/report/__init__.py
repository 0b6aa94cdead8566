"""The page of a comparison."""

from .page import write_page as write_page
