"""GUI grounding benchmarks in their published formats: loaders, metrics, validation and evaluation."""
