"""One model for clients without a GPU: the server, and the client of it."""
