"""Vision-language models: loading, data, sampling, and the recipes GRPO family, PAPO, APO and SFT."""
