"""One module per patch: its declaration and its replacement, side by side."""
