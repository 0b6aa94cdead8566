"""The suite against the oldest and the newest packages that `pyproject.toml` allows, in environments of their own."""
