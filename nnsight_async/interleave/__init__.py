"""A block in a greenlet, woken at the places of a forward pass that it asks for."""
