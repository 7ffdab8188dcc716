"""Who may ask what, and how much of it: keys, scopes, and where they are kept."""
