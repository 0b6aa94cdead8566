"""The papers' tables and figures as code: one folder per paper, the runner in `runner/`; no part of the package."""
