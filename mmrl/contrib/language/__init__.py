"""Methods from single papers for language and vision-language models."""
