"""Which noise suits a table: no paper's table, the figures of `docs/likelihoods.md`."""
