"""The paper's experiments as commands: each writes one HTML page with what was expected, and what was found."""
