"""Inside vLLM's worker: where the runners are entered, and how values leave."""
