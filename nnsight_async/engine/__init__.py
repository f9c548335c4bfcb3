"""The client's side of vLLM: building it, talking to it, ending it."""
