"""From a `with` body or a function to a block: found, checked, compiled, serialised, and its names written back."""
