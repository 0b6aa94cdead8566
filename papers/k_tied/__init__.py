"""The k-tied Normal: standard deviations of low rank."""
