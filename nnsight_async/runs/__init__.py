"""The caller's side of one run: its tokens, its saved values, its end."""
